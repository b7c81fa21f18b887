"""The paged cache and the attention over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.pages import pages_of, tokens_of
from shardline.runtime.ops.attention.kv_cache import write_kv_reference
from shardline.runtime.ops.attention.paged import paged_attention, paged_attention_reference
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn, write_kv

BLOCK_SIZE = 16

host_attention = partial(paged_attention, KERNELS)


@dataclass
class Sequence:
    """All queries, keys and values of one sequence."""

    query: Tensor  # [length, Hq, D]
    key: Tensor  # [length, Hk, D]
    value: Tensor

    @property
    def length(self) -> int:
        return self.query.shape[0]


def random_sequence(rng, length, dtype, *, heads=4, kv_heads=2, dim=64) -> Sequence:
    return Sequence(
        2 * randn(length, heads, dim, dtype=dtype, rng=rng),
        randn(length, kv_heads, dim, dtype=dtype, rng=rng),
        randn(length, kv_heads, dim, dtype=dtype, rng=rng),
    )


def rounds_weights(isa: str, dtype: torch.dtype) -> bool:
    return isa in ("avx512_bf16", "avx512_amx") and dtype == torch.bfloat16


E4M3 = torch.float8_e4m3fn


@pytest.fixture(params=[None, torch.int8], ids=["plain", "int8"])
def stored(request: pytest.FixtureRequest) -> torch.dtype | None:
    """The type of a cache that holds bytes and scales; None: the activations'. Tests of bits do without e4m3, which is
    read as int8 is, except that tables differ."""
    return request.param


def attend(
    sequences: list[tuple[Sequence, int, int]],
    *,
    stored: torch.dtype | None = None,
    shuffle: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    poison: bool = True,
    op=host_attention,
) -> list[Tensor]:
    """One call for queries [begin, end) of each sequence, its keys being [0, end); returns one output per sequence.

    Cache memory that no query may see is NaN, if `poison`. Blocks before the window are freed: their table says 0. An
    `op` that is no `partial` with the host's kernels gets pages in the order of tokens.
    """
    rng = None if shuffle is None else torch.Generator().manual_seed(shuffle)
    first = sequences[0][0]
    _, kv_heads, dim = first.key.shape
    counts = [-(-end // BLOCK_SIZE) for _, _, end in sequences]
    num_blocks = sum(counts) + 1
    ids = 1 + (torch.arange(num_blocks - 1) if rng is None else torch.randperm(num_blocks - 1, generator=rng))
    shape = (num_blocks, kv_heads, BLOCK_SIZE, dim)
    unseen = torch.nan if poison else 0.0
    caches = [
        torch.full(shape, 99.0).to(stored) if stored else torch.full(shape, unseen, dtype=first.key.dtype)
        for _ in range(2)
    ]
    names = ("key_scales", "value_scales") if stored else ()
    on_host = isinstance(op, partial) and KERNELS in op.args
    write = partial(write_kv, KERNELS) if on_host else write_kv_reference
    scales = {name: torch.full(shape[:3], unseen) for name in names}
    tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
    for s, (sequence, begin, end) in enumerate(sequences):
        tables[s, : counts[s]], ids = ids[: counts[s]].int(), ids[counts[s] :]
        positions = torch.arange(end)
        slots = tables[s, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        if window is not None:
            freed = max(0, begin - window + 1) // BLOCK_SIZE
            tables[s, :freed] = 0
            slots[: freed * BLOCK_SIZE] = -1
        write(sequence.key[:end], sequence.value[:end], caches[0], caches[1], slots, **scales)
    query = torch.cat([sequence.query[begin:end] for sequence, begin, end in sequences])
    lengths = [end - begin for _, begin, end in sequences]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    context_lens = torch.tensor([end for _, _, end in sequences], dtype=torch.int32)
    scale = dim**-0.5
    options = {"window": window, "softcap": softcap, "sinks": sinks, "chunked": chunked, **scales}
    out = op(query, *caches, tables, starts, context_lens, scale, **options)
    return list(out.split(lengths))


@cache
def references(sizes: bool, dtype, heads, kv_heads, dim, **options) -> list[Tensor]:
    """The reference's outputs of `random_batch`, which are those of every ISA; `sizes`: of the values' magnitudes."""
    batch = random_batch(torch.Generator().manual_seed(0), dtype, heads, kv_heads, dim)
    if sizes:
        batch = [(replace(sequence, value=sequence.value.abs()), begin, end) for sequence, begin, end in batch]
    return attend(batch, **options, poison=False, op=paged_attention_reference)


def random_batch(rng, dtype, heads, kv_heads, dim) -> list[tuple[Sequence, int, int]]:
    lengths = [(0, 37), (36, 37), (600, 603), (0, 1), (1020, 1030)]
    return [
        (random_sequence(rng, end, dtype, heads=heads, kv_heads=kv_heads, dim=dim), begin, end)
        for begin, end in lengths
    ]


STORED = (None, torch.int8, E4M3)
HEADS = ((4, 2, 64), (3, 1, 128), (2, 2, 80), (8, 1, 36), (1, 1, 7))
LIMITS = ((None, None), (20, None), (None, 5.0), (700, 30.0))
# Any two of a type, heads and limits are together at least once.
COMBINATIONS = [
    (STORED[(number + place) % 3], *heads, *limits)
    for number, heads in enumerate(HEADS)
    for place, limits in enumerate(LIMITS)
]


@pytest.mark.parametrize(("stored", "heads", "kv_heads", "dim", "window", "softcap"), COMBINATIONS, ids=str)
def test_matches_reference(isa, stored, dtype, rng, heads, kv_heads, dim, window, softcap):
    dim -= dim % 2 if dtype == torch.bfloat16 else 0
    options = {"stored": stored, "window": window, "softcap": softcap}
    actual = attend(random_batch(rng, dtype, heads, kv_heads, dim), **options)
    expected = references(False, dtype, heads, kv_heads, dim, **options)
    if not rounds_weights(isa, dtype):
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, scale=2.0)
        return
    # Weights w_j (1 + d_j), |d_j| <= 2^-8, over their own sum, are off by at most 2^-8 sum_j w_j (|value_j| + |out|).
    sizes = references(True, dtype, heads, kv_heads, dim, **options)
    for a, e, size in zip(actual, expected, sizes, strict=True):
        one_ulp = e.double().abs() * 2**-7
        bound = 2**-8 * (1 + 2**-7) * (size.double() + e.double().abs()) + one_ulp + 2e-5
        error = (a.double() - e.double()).abs()
        assert (error <= bound).all(), f"off by {error.max()}"


SINKS = torch.tensor([-200.0, -1.0, 2.0, 40.0])


@cache
def reference_with_sinks(**options) -> Tensor:
    """The reference's output, which is that of every ISA."""
    sequence = random_sequence(torch.Generator().manual_seed(0), 1100, torch.float32, dim=32)
    (expected,) = attend([(sequence, 0, 1100)], **options, sinks=SINKS, poison=False, op=paged_attention_reference)
    return expected


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (20, True), (700, True)])
@pytest.mark.usefixtures("isa")
def test_sinks_and_chunks(stored, rng, window, chunked):
    """They match the reference, and neither steps nor neighbours change their bits."""
    options = {"stored": stored, "window": window, "chunked": chunked}
    sequence = random_sequence(rng, 1100, torch.float32, dim=32)
    (whole,) = attend([(sequence, 0, 1100)], **options, sinks=SINKS)
    assert_close(whole, reference_with_sinks(**options), scale=2.0)
    for begin, end in [(0, 5), (19, 41), (699, 701), (1099, 1100)]:
        batch = [(random_sequence(rng, 40, torch.float32, dim=32), 3, 40), (sequence, begin, end)]
        assert_same_bits(attend(batch, **options, sinks=SINKS, shuffle=begin)[1], whole[begin:end])


@pytest.mark.parametrize("query_scale", [0.2, 1.0])
@pytest.mark.usefixtures("isa")
def test_in_bf16_no_further_from_exact_than_torch(rng, query_scale):
    sequence = random_sequence(rng, 1100, torch.bfloat16)
    sequence.query *= query_scale
    (ours,) = attend([(sequence, 0, 1100)])

    def torch_attention(dtype: torch.dtype) -> Tensor:
        heads = (sequence.query, sequence.key.repeat_interleave(2, 1), sequence.value.repeat_interleave(2, 1))
        q, k, v = (x.transpose(0, 1)[None].to(dtype) for x in heads)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    expected = torch_attention(torch.float64)

    def distance(actual: Tensor) -> float:
        return float((actual.double() - expected).square().mean().sqrt())

    assert distance(ours) <= 1.02 * distance(torch_attention(torch.bfloat16))


@pytest.mark.parametrize(("window", "stored"), [(None, None), (None, torch.int8), (100, None), (100, E4M3)])
@pytest.mark.usefixtures("isa")
def test_chunks_and_decode_have_the_bits_of_the_whole(stored, dtype, rng, window):
    sequence = random_sequence(rng, 1100, dtype, dim=32)
    (whole,) = attend([(sequence, 0, 1100)], stored=stored, window=window)
    for begin, end in [(0, 5), (5, 511), (511, 513), (513, 1099), (546, 550), (1099, 1100)]:
        (chunk,) = attend([(sequence, begin, end)], stored=stored, window=window, shuffle=begin)
        assert_same_bits(chunk, whole[begin:end])
    for position in (0, 99, 100, 510, 511, 512, 1023, 1024, 1099):
        (decoded,) = attend([(sequence, position, position + 1)], stored=stored, window=window)
        assert_same_bits(decoded, whole[position : position + 1])


@pytest.mark.usefixtures("isa", "two_threads")
def test_neighbours_blocks_and_threads_do_not_matter(stored, dtype, rng):
    sequence = random_sequence(rng, 700, dtype)
    (alone,) = attend([(sequence, 650, 700)], stored=stored)
    others = [(random_sequence(rng, end, dtype), begin, end) for begin, end in [(0, 33), (699, 700), (100, 640)]]
    for place in range(len(others) + 1):
        batch = [*others[:place], (sequence, 650, 700), *others[place:]]
        assert_same_bits(attend(batch, stored=stored, shuffle=place)[place], alone)


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.usefixtures("isa")
def test_threads_that_share_the_splits_of_one_row_do_not_matter(stored, dtype, rng, window):
    sequences = [random_sequence(rng, 1100, dtype), random_sequence(rng, 30, dtype)]
    batch = [(sequences[0], 1090, 1100), (sequences[1], 29, 30)]
    expected = attend(batch, stored=stored, window=window)
    _cpu.set_num_threads(5)
    actual = attend(batch, stored=stored, window=window)
    _cpu.set_num_threads(1)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


@pytest.mark.usefixtures("isa")
def test_a_shard_of_the_heads_has_the_bits_of_the_whole(stored, dtype, rng):
    sequence = random_sequence(rng, 530, dtype, heads=12, kv_heads=4, dim=32)
    (whole,) = attend([(sequence, 500, 530)], stored=stored)
    for first, last in [(0, 1), (1, 3), (3, 4)]:  # KV groups
        shard = Sequence(
            sequence.query[:, 3 * first : 3 * last].contiguous(),
            sequence.key[:, first:last].contiguous(),
            sequence.value[:, first:last].contiguous(),
        )
        assert_same_bits(attend([(shard, 500, 530)], stored=stored)[0], whole[:, 3 * first : 3 * last].contiguous())


@pytest.mark.usefixtures("isa")
def test_later_tokens_cannot_poison_earlier_ones(stored, dtype, rng):
    sequence = random_sequence(rng, 40, dtype)
    (clean,) = attend([(sequence, 0, 40)], stored=stored)
    sequence.key[20:] = torch.inf
    sequence.value[20:] = torch.nan
    (poisoned,) = attend([(sequence, 0, 40)], stored=stored)
    assert_same_bits(poisoned[:20], clean[:20])


def test_value_heads_may_be_narrower(rng):
    sequence = random_sequence(rng, 20, torch.float32, heads=2, kv_heads=1, dim=48)
    # [1, 1, 32, 48]
    key, value = (torch.cat([part, part[:12]])[None].transpose(1, 2) for part in (sequence.key, sequence.value))
    order = KERNELS.page_order(torch.float32)
    key_cache = pages_of(key, "keys", order)
    arguments = (
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 20], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32),
        0.2,
    )
    whole = paged_attention(KERNELS, sequence.query, key_cache, pages_of(value, "values", order), *arguments)
    narrow = paged_attention(KERNELS, sequence.query, key_cache, pages_of(value[..., :40], "values", order), *arguments)
    assert_same_bits(narrow, whole[..., :40])


def test_wrong_indices_are_refused(rng):
    cache = torch.zeros(4, 1, BLOCK_SIZE, 8)

    def call(table: list[int], context_len: int, num_tokens: int = 1) -> Tensor:
        return paged_attention(
            KERNELS,
            torch.zeros(num_tokens, 1, 8),
            cache,
            cache,
            torch.tensor([table], dtype=torch.int32),
            torch.tensor([0, num_tokens], dtype=torch.int32),
            torch.tensor([context_len], dtype=torch.int32),
            1.0,
        )

    assert call([3, 1], 32).shape == (1, 1, 8)
    with pytest.raises(ValueError, match="outside the KV cache"):
        call([3, 4], 32)
    with pytest.raises(ValueError, match="context length 33"):
        call([3, 1], 33)
    with pytest.raises(ValueError, match="context length 1 "):
        call([3, 1], 1, num_tokens=2)
    with pytest.raises(ValueError, match="a slot lies outside"):
        write_kv(KERNELS, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), cache, cache, torch.tensor([64]))


@pytest.mark.parametrize("num_tokens", [1, 5, 50])
@pytest.mark.usefixtures("isa")
def test_write_kv(dtype, rng, num_tokens):
    kv = randn(num_tokens, 2, 3, 20, dtype=dtype, rng=rng)
    key, value = kv[:, 0], kv[:, 1]  # strided, as slices of a fused projection are
    slots = torch.randperm(8 * BLOCK_SIZE, generator=rng)[:num_tokens]
    slots[num_tokens // 2] = -1
    caches = [torch.zeros(8, 3, BLOCK_SIZE, 20, dtype=dtype) for _ in range(4)]
    write_kv(KERNELS, key, value, caches[0], caches[1], slots)
    write_kv_reference(key, value, caches[2], caches[3], slots)
    order = KERNELS.page_order(dtype)
    assert_same_bits(tokens_of(caches[0], "keys", order), caches[2])
    assert_same_bits(tokens_of(caches[1], "values", order), caches[3])


@pytest.mark.parametrize(("num_tokens", "stored"), [(1, E4M3), (5, torch.int8), (50, torch.int8), (50, E4M3)])
@pytest.mark.usefixtures("isa")
def test_write_kv_as_bytes(dtype, rng, num_tokens, stored):
    kv = randn(num_tokens, 2, 3, 20, dtype=dtype, rng=rng)
    kv *= torch.randn(kv.shape, generator=rng).mul(3).exp2().to(dtype)  # so that small elements are subnormal in e4m3
    kv[0, 0, 1] = 0.0
    kv[-1, 0, 2] = -1e-38
    kv[-1, 1, 0, 3] = torch.inf
    slots = torch.randperm(8 * BLOCK_SIZE, generator=rng)[:num_tokens]
    slots[num_tokens // 2] = -1 if num_tokens > 1 else 7
    written = []
    for op in (partial(write_kv, KERNELS), write_kv_reference):
        caches = [torch.zeros(8, 3, BLOCK_SIZE, 20).to(stored) for _ in range(2)]
        scales = [torch.zeros(8, 3, BLOCK_SIZE) for _ in range(2)]
        op(kv[:, 0], kv[:, 1], caches[0], caches[1], slots, key_scales=scales[0], value_scales=scales[1])
        order = "tokens" if op is write_kv_reference else KERNELS.page_order(dtype)
        keys, values = (cache.view(torch.int8) for cache in caches)
        written.append((tokens_of(keys, "keys", order), tokens_of(values, "values", order), *scales))
    for actual, expected in zip(*written, strict=True):
        assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))
    assert written[0][3].isnan().sum() == 1


@pytest.mark.usefixtures("isa")
def test_every_e4m3_number_is_read_exactly(dtype):
    """One key has any score, so the output is the value."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    codes[[127, 255]] = torch.zeros(2).to(E4M3)
    values = torch.cat([codes.view(torch.int8), torch.zeros(15 * 256, dtype=torch.int8)]).view(1, 1, BLOCK_SIZE, 256)
    pages = pages_of(values, "values", KERNELS.page_order(dtype)).view(E4M3)
    scales, starts = torch.ones(1, 1, BLOCK_SIZE), torch.tensor([0, 1], dtype=torch.int32)
    query, tables, lengths = torch.ones(1, 1, 256, dtype=dtype), starts[:1].view(1, 1), starts[1:]
    options: dict[str, Any] = {"key_scales": scales, "value_scales": scales}
    out = paged_attention(KERNELS, query, pages, pages, tables, starts, lengths, 1e-9, **options)
    assert_same_bits(out.view(-1) + 0.0, codes.to(dtype) + 0.0)


def test_a_row_that_is_not_finite_makes_its_scale_nan(rng):
    kv = randn(2, 1, 20, rng=rng)
    kv[0, 0, 3] = torch.inf
    cache, scales = torch.zeros(1, 1, BLOCK_SIZE, 20, dtype=torch.int8), torch.zeros(1, 1, BLOCK_SIZE)
    write_kv(KERNELS, kv, kv, cache, cache, torch.tensor([0, 1]), key_scales=scales, value_scales=scales)
    assert scales[0, 0, 0].isnan()
    assert scales[0, 0, 1].isfinite()
