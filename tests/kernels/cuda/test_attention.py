from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from shardline.runtime.ops.attention.paged import paged_attention_reference
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.attention.test_paged import attend, random_sequence
from tests.runtime.ops.attention.test_partials import merged
from tests.runtime.ops.helpers import assert_close, assert_same_bits


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    spread_splits: bool | None = None,
) -> Tensor:
    out = torch.full((query.shape[0], query.shape[1], value_cache.shape[3]), torch.nan)
    arguments = (query, key_cache, value_cache, block_tables, query_starts, context_lens, out, scale, window, softcap)
    KERNELS.paged_attention(*arguments, key_scales, value_scales, sinks, chunked, spread_splits=spread_splits)
    return out


in_one = functools.partial(paged_attention, spread_splits=False)
spread = functools.partial(paged_attention, spread_splits=True)
STORED = (None, torch.int8, torch.float8_e4m3fn)
"""Types of the cache; None: the activations'."""


HEADS = ((4, 2, 32), (3, 1, 20), (9, 1, 7))
LIMITS = ((None, None), (20, None), (530, 5.0))
# Any two of a type, heads and limits are together once.
COMBINATIONS = [
    (stored, *HEADS[place], *LIMITS[(place + number) % 3]) for number, stored in enumerate(STORED) for place in range(3)
]


@pytest.mark.parametrize(("stored", "heads", "kv_heads", "dim", "window", "softcap"), COMBINATIONS[::4], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_merged_parts_are_the_attention_of_one_rank(rng, num_ranks, stored, heads, kv_heads, dim, window, softcap):
    batch = [
        (random_sequence(rng, end, torch.float32, heads=heads, kv_heads=kv_heads, dim=dim), begin, end)
        for begin, end in [(0, 4), (560, 561), (511, 514)]
    ]
    limits = {"stored": stored, "window": window, "softcap": softcap}
    for ours, whole in zip(
        attend(batch, op=functools.partial(merged, KERNELS, num_ranks), **limits),
        attend(batch, op=in_one, **limits),
        strict=True,
    ):
        assert_same_bits(ours, whole)


@pytest.mark.parametrize(("stored", "heads", "kv_heads", "dim", "window", "softcap"), COMBINATIONS, ids=str)
def test_matches_reference_however_splits_are_run(rng, stored, heads, kv_heads, dim, window, softcap):
    batch = [
        (random_sequence(rng, end, torch.float32, heads=heads, kv_heads=kv_heads, dim=dim), begin, end)
        for begin, end in [(0, 4), (19, 20), (560, 561), (511, 514)]
    ]
    expected = attend(batch, stored=stored, window=window, softcap=softcap, poison=False, op=paged_attention_reference)
    serial = attend(batch, stored=stored, window=window, softcap=softcap, op=in_one)
    parallel = attend(batch, stored=stored, window=window, softcap=softcap, op=spread)
    for s, p, e in zip(serial, parallel, expected, strict=True):
        assert_close(s, e, scale=2.0)
        assert_same_bits(p, s)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_chunks_and_decode_have_the_bits_of_the_whole(rng, stored, window):
    sequence = random_sequence(rng, 540, torch.float32, heads=2, kv_heads=1, dim=16)
    (whole,) = attend([(sequence, 500, 540)], stored=stored, window=window, op=in_one)
    for begin, end in [(500, 505), (505, 511), (511, 513), (513, 540)]:
        (chunk,) = attend([(sequence, begin, end)], stored=stored, window=window, shuffle=begin, op=in_one)
        assert_same_bits(chunk, whole[begin - 500 : end - 500])
    for position in (500, 511, 512, 539):
        for op in (in_one, spread):
            (decoded,) = attend([(sequence, position, position + 1)], stored=stored, window=window, op=op)
            assert_same_bits(decoded, whole[position - 500 : position - 499])


def test_neighbours_and_blocks_do_not_matter(rng):
    sequence = random_sequence(rng, 520, torch.float32, dim=16)
    (alone,) = attend([(sequence, 515, 520)], op=paged_attention)
    others = [(random_sequence(rng, end, torch.float32, dim=16), begin, end) for begin, end in [(0, 5), (19, 20)]]
    for place in range(3):
        batch = [*others[:place], (sequence, 515, 520), *others[place:]]
        assert_same_bits(attend(batch, shuffle=place, op=paged_attention)[place], alone)


def test_a_shard_of_the_heads_has_the_bits_of_the_whole(rng):
    sequence = random_sequence(rng, 30, torch.float32, heads=6, kv_heads=2, dim=16)
    (whole,) = attend([(sequence, 20, 30)], op=paged_attention)
    shard = type(sequence)(*(part[:, -(part.shape[1] // 2) :].contiguous() for part in vars(sequence).values()))
    assert_same_bits(attend([(shard, 20, 30)], op=paged_attention)[0], whole[:, 3:].contiguous())


def test_padding_of_a_batch_is_zero_and_reads_nothing(rng):
    cache = torch.full((2, 1, 16, 16), torch.nan)
    starts, lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    arguments = (torch.ones(2, 2, 16), cache, cache, torch.ones(2, 40, dtype=torch.int32), starts, lens, 1.0)
    for op in (in_one, spread):
        assert_same_bits(op(*arguments), torch.zeros(2, 2, 16))


def test_value_heads_may_be_narrower(rng):
    sequence = random_sequence(rng, 16, torch.float32, heads=2, kv_heads=1, dim=48)
    keys, values = (cache.transpose(0, 1)[None].contiguous() for cache in (sequence.key, sequence.value))
    starts, lens = torch.tensor([0, 16], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    arguments = (torch.zeros(1, 1, dtype=torch.int32), starts, lens, 0.2)
    whole = paged_attention(sequence.query, keys, values, *arguments)
    narrow = paged_attention(sequence.query, keys, values[..., :40].contiguous(), *arguments)
    assert_close(narrow, whole[..., :40].contiguous())


def test_fp8_is_as_near_as_its_rounding_allows(rng):
    """e4m3 has 4 significant bits: a key's or value's elements are off by at most 2^-4 of their size, or of the
    smallest normal number's (2^-6 of 448).
    """
    sequence = random_sequence(rng, 300, torch.float32, heads=4, kv_heads=2, dim=32)
    sequence.query *= 0.05
    (exact,) = attend([(sequence, 240, 300)], op=paged_attention)
    (actual,) = attend([(sequence, 240, 300)], stored=torch.float8_e4m3fn, op=paged_attention)

    def off_by(rows: Tensor) -> Tensor:
        rows = rows.abs()
        return (rows + rows.amax(-1, keepdim=True) * 2.0**-6 / 448) * 2.0**-4

    queries, keys, values = sequence.query[240:].abs(), off_by(sequence.key), off_by(sequence.value)
    heads = [0, 0, 1, 1]
    # What a score may be off by, and so the logarithm of a weight, by both it and the sum of all.
    score = torch.einsum("qhd,khd->hqk", queries, keys[:, heads]).amax(-1).T[..., None] * 32**-0.5
    off = torch.expm1(2 * score) * sequence.value.abs().amax() + values.amax()
    error = (actual - exact).abs()
    assert (error <= off).all()
    assert off.median() < 0.6
    assert error.norm() > 1e-3 * exact.norm(), "there is something to bound"
