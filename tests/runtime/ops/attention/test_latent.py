"""The paged cache of latents and the attention over it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.pages import tokens_of
from shardline.kernels.tensors import LatentCache, QuantizedLatents
from shardline.runtime.ops.attention.kv_cache import write_latent, write_latent_reference
from shardline.runtime.ops.attention.latent import mla_attention, mla_attention_reference
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn

BLOCK_SIZE = 16

host_attention = partial(mla_attention, KERNELS)


@dataclass
class Sequence:
    """All queries and cached rows of one sequence."""

    query_latent: Tensor  # [length, H, R]
    query_rope: Tensor  # [length, H, P]
    latent: Tensor  # [length, R]
    rope: Tensor  # [length, P]


def random_sequence(rng, length, dtype, *, heads=4, latent=48, rope=16) -> Sequence:
    return Sequence(
        2 * randn(length, heads, latent, dtype=dtype, rng=rng),
        2 * randn(length, heads, rope, dtype=dtype, rng=rng),
        randn(length, latent, dtype=dtype, rng=rng),
        randn(length, rope, dtype=dtype, rng=rng),
    )


def empty_cache(num_blocks: int, latent: int, rope: int, dtype: torch.dtype, fill: float) -> LatentCache:
    """`dtype`: of the cache; one of bytes has scales, which are filled."""
    if dtype.itemsize > 1:
        return torch.full((num_blocks, BLOCK_SIZE, latent + rope), fill, dtype=dtype)
    return QuantizedLatents(
        torch.full((num_blocks, BLOCK_SIZE, latent), 99.0).to(dtype),
        torch.full((num_blocks, BLOCK_SIZE, rope), fill, dtype=torch.bfloat16),
        torch.full((num_blocks, BLOCK_SIZE), fill),
    )


def attend(
    sequences: list[tuple[Sequence, int, int]],
    *,
    stored: torch.dtype | None = None,
    shuffle: int | None = None,
    poison: bool = True,
    op=host_attention,
) -> list[Tensor]:
    """One call for queries [begin, end) of each sequence, its keys being [0, end); returns one output per sequence.

    Cache memory that no query may see is NaN, if `poison`. An `op` other than the host's gets pages in the order of
    tokens.
    """
    write = partial(write_latent, KERNELS) if op is host_attention else write_latent_reference
    rng = None if shuffle is None else torch.Generator().manual_seed(shuffle)
    first = sequences[0][0]
    dtype, latent_dim, rope_dim = first.latent.dtype, first.latent.shape[1], first.rope.shape[1]
    counts = [-(-end // BLOCK_SIZE) for _, _, end in sequences]
    num_blocks = sum(counts) + 1
    ids = 1 + (torch.arange(num_blocks - 1) if rng is None else torch.randperm(num_blocks - 1, generator=rng))
    cache = empty_cache(num_blocks, latent_dim, rope_dim, stored or dtype, torch.nan if poison else 0.0)
    tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
    for s, (sequence, _, end) in enumerate(sequences):
        tables[s, : counts[s]], ids = ids[: counts[s]].int(), ids[counts[s] :]
        positions = torch.arange(end)
        slots = tables[s, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        write(sequence.latent[:end], sequence.rope[:end], cache, slots)
    query_latent = torch.cat([sequence.query_latent[begin:end] for sequence, begin, end in sequences])
    # As in a layer: the rotated part is a slice of each head.
    rope = torch.cat([sequence.query_rope[begin:end] for sequence, begin, end in sequences])
    query_rope = torch.cat([torch.full_like(rope, torch.nan), rope], -1)[..., rope_dim:]
    lengths = [end - begin for _, begin, end in sequences]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    context_lens = torch.tensor([end for _, _, end in sequences], dtype=torch.int32)
    scale = (latent_dim + rope_dim) ** -0.5
    return list(op(query_latent, query_rope, cache, tables, starts, context_lens, scale).split(lengths))


def random_batch(rng, dtype, **sizes) -> list[tuple[Sequence, int, int]]:
    lengths = [(0, 37), (36, 37), (600, 603), (0, 1), (1020, 1030)]
    return [(random_sequence(rng, end, dtype, **sizes), begin, end) for begin, end in lengths]


@cache
def references(dtype, stored, **sizes) -> list[Tensor]:
    """The reference's outputs of `random_batch`, which are those of every ISA."""
    batch = random_batch(torch.Generator().manual_seed(0), dtype, **sizes)
    return attend(batch, stored=stored, poison=False, op=mla_attention_reference)


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "stored"),
    [
        (4, 48, 16, None),
        (16, 512, 64, None),
        (3, 130, 8, None),
        (70, 32, 8, None),
        (1, 7, 5, None),
        (20, 33, 3, None),
        (16, 96, 64, torch.int8),
        (3, 130, 8, torch.float8_e4m3fn),
        (70, 36, 6, torch.float8_e4m3fn),
    ],
)
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, heads, latent, rope, stored):
    sizes = {"heads": heads, "latent": latent, "rope": rope}
    actual = attend(random_batch(rng, dtype, **sizes), stored=stored)
    for a, e in zip(actual, references(dtype, stored, **sizes), strict=True):
        if dtype == torch.float32:
            assert_close(a, e, scale=2.0)
            continue
        # One unit in the last place for the last rounding. Weights rounded to bf16 are off by 2^-9 at most, so that the
        # result is off by 2^-9 of the mean distance of values from it, which is below 2 here. With scales, products of
        # weights and scales are rounded, but the weights are summed: it is off by 2^-9 of the mean size of values too.
        factor = 1 if stored is None else 2
        error = (a.double() - e.double()).abs()
        assert (error <= 2**-7 * e.double().abs() + factor * 2**-8).all(), f"off by {error.max()}"
        assert error.square().mean().sqrt() <= factor * 2**-9 * e.double().square().mean().sqrt()


@pytest.mark.parametrize(("heads", "stored"), [(1, None), (5, torch.float8_e4m3fn), (16, None), (40, torch.int8)])
@pytest.mark.usefixtures("isa")
def test_chunks_and_decode_have_the_bits_of_the_whole(dtype, rng, heads, stored):
    sequence = random_sequence(rng, 1100, dtype, heads=heads)
    (whole,) = attend([(sequence, 0, 1100)], stored=stored)
    for begin, end in [(0, 5), (5, 511), (511, 513), (513, 1099), (1099, 1100)]:
        (chunk,) = attend([(sequence, begin, end)], stored=stored, shuffle=begin)
        assert_same_bits(chunk, whole[begin:end])
    for position in (0, 99, 100, 510, 511, 512, 1023, 1024, 1099):
        (decoded,) = attend([(sequence, position, position + 1)], stored=stored)
        assert_same_bits(decoded, whole[position : position + 1])


@pytest.mark.usefixtures("isa", "two_threads")
def test_neighbours_blocks_and_threads_do_not_matter(dtype, rng):
    sequence = random_sequence(rng, 700, dtype)
    (alone,) = attend([(sequence, 650, 700)])
    others = [(random_sequence(rng, end, dtype), begin, end) for begin, end in [(0, 33), (699, 700), (100, 640)]]
    for place in range(len(others) + 1):
        batch = [*others[:place], (sequence, 650, 700), *others[place:]]
        assert_same_bits(attend(batch, shuffle=place)[place], alone)


@pytest.mark.usefixtures("isa")
def test_threads_that_share_the_splits_of_one_tile_do_not_matter(dtype, rng):
    sequences = [random_sequence(rng, 1100, dtype), random_sequence(rng, 30, dtype)]
    batch = [(sequences[0], 1090, 1100), (sequences[1], 29, 30)]
    expected = attend(batch)
    _cpu.set_num_threads(5)
    actual = attend(batch)
    _cpu.set_num_threads(1)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


@pytest.mark.usefixtures("isa", "two_threads")
def test_sequences_that_keep_a_prompt_in_the_same_blocks_have_the_bits_they_have_alone(dtype, rng):
    sequences = [random_sequence(rng, length, dtype, heads=5) for length in (540, 513, 600)]
    cache = torch.zeros(50, BLOCK_SIZE, 64, dtype=dtype)
    tables = torch.arange(38, dtype=torch.int32).repeat(3, 1)
    tables[:, 32:] = torch.arange(32, 50, dtype=torch.int32).view(3, 6)
    for sequence, table in zip(sequences, tables, strict=True):
        sequence.latent[:512], sequence.rope[:512] = sequences[0].latent[:512], sequences[0].rope[:512]
        positions = torch.arange(len(sequence.latent))
        slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        write_latent(KERNELS, sequence.latent, sequence.rope, cache, slots)
    lengths = torch.tensor([len(sequence.latent) for sequence in sequences], dtype=torch.int32)
    query_latent, query_rope = (
        torch.cat([getattr(sequence, name)[-1:] for sequence in sequences]) for name in ("query_latent", "query_rope")
    )
    starts = torch.arange(4, dtype=torch.int32)
    together = host_attention(query_latent, query_rope, cache, tables, starts, lengths, 64**-0.5)
    for sequence, length, actual in zip(sequences, lengths.tolist(), together.split(1), strict=True):
        assert_same_bits(actual, attend([(sequence, length - 1, length)])[0])


@pytest.mark.usefixtures("isa")
def test_a_shard_of_the_heads_has_the_bits_of_the_whole(dtype, rng):
    sequence = random_sequence(rng, 530, dtype, heads=12)
    (whole,) = attend([(sequence, 500, 530)])
    for first, last in [(0, 1), (1, 6), (6, 12)]:
        shard = Sequence(
            sequence.query_latent[:, first:last].contiguous(),
            sequence.query_rope[:, first:last].contiguous(),
            sequence.latent,
            sequence.rope,
        )
        assert_same_bits(attend([(shard, 500, 530)])[0], whole[:, first:last].contiguous())


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.usefixtures("isa")
def test_later_tokens_cannot_poison_earlier_ones(dtype, rng, heads):
    sequence = random_sequence(rng, 540, dtype, heads=heads)
    (clean,) = attend([(sequence, 0, 540)])
    for first_bad in (21, 511, 513, 532):
        poisoned = Sequence(sequence.query_latent, sequence.query_rope, sequence.latent.clone(), sequence.rope.clone())
        poisoned.latent[first_bad::2] = torch.nan
        poisoned.latent[first_bad + 1 :: 2] = torch.inf
        poisoned.rope[first_bad:] = torch.inf
        (result,) = attend([(poisoned, 0, 540)])
        assert_same_bits(result[:first_bad], clean[:first_bad])
        assert result[first_bad:].isnan().any()


def test_wrong_indices_are_refused():
    cache = torch.zeros(4, BLOCK_SIZE, 12)

    def call(table: list[int], context_len: int, num_tokens: int = 1) -> Tensor:
        return mla_attention(
            KERNELS,
            torch.zeros(num_tokens, 1, 8),
            torch.zeros(num_tokens, 1, 4),
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
        write_latent(KERNELS, torch.zeros(1, 8), torch.zeros(1, 4), cache, torch.tensor([64]))


@pytest.mark.parametrize(("num_tokens", "latent_dim"), [(1, 30), (5, 31), (50, 30), (600, 31)])
@pytest.mark.usefixtures("isa", "two_threads")
def test_write_latent(dtype, rng, num_tokens, latent_dim):
    down = randn(num_tokens, 50, dtype=dtype, rng=rng)
    latent, rope = down[:, 10 : 10 + latent_dim], down[:, 10 + latent_dim :]
    slots = torch.randperm(40 * BLOCK_SIZE, generator=rng)[:num_tokens]
    slots[num_tokens // 2] = -1
    caches = [torch.zeros(40, BLOCK_SIZE, 40, dtype=dtype) for _ in range(2)]
    write_latent(KERNELS, latent, rope, caches[0], slots)
    write_latent_reference(latent, rope, caches[1], slots)
    assert_same_bits(tokens_of(caches[0], "keys", KERNELS.page_order(dtype)), caches[1])


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.usefixtures("isa", "two_threads")
def test_write_latent_as_bytes(dtype, rng, stored):
    down = randn(60, 50, dtype=dtype, rng=rng)
    latent, rope = down[:, 10:40], down[:, 40:]
    slots = torch.randperm(40 * BLOCK_SIZE, generator=rng)[:60]
    slots[30] = -1
    caches = [empty_cache(40, 30, 10, stored, 0.0) for _ in range(2)]
    write_latent(KERNELS, latent, rope, caches[0], slots)
    write_latent_reference(latent, rope, caches[1], slots)
    order = KERNELS.page_order(dtype)
    assert isinstance(caches[0], QuantizedLatents)
    assert isinstance(caches[1], QuantizedLatents)
    assert torch.equal(tokens_of(caches[0].values.view(torch.int8), "keys", order), caches[1].values.view(torch.int8))
    assert_same_bits(tokens_of(caches[0].rope_keys, "keys", order), caches[1].rope_keys)
    assert_same_bits(caches[0].scales, caches[1].scales)
    with pytest.raises(ValueError, match="latents in bytes need rope_cache and scales"):
        write_latent(KERNELS, latent, rope, caches[0]._replace(scales=None), slots)  # type: ignore[arg-type]
