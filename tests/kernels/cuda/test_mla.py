from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from shardline.kernels.cuda.triton import attention as launchers
from shardline.kernels.tensors import QuantizedLatents
from shardline.runtime.ops.attention.kv_cache import write_latent_reference
from shardline.runtime.ops.attention.latent import mla_attention_reference
from shardline.runtime.ops.attention.linear_heads import linear_heads_reference
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.attention.test_latent import attend, random_sequence
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn


def mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    spread_splits: bool | None = None,
) -> Tensor:
    out = torch.full_like(query_latent, torch.nan)
    index = (block_tables, query_starts, context_lens)
    launchers.mla_attention(query_latent, query_rope, cache, *index, out, scale, spread_splits=spread_splits)
    return out


in_one = functools.partial(mla_attention, spread_splits=False)
spread = functools.partial(mla_attention, spread_splits=True)


# The widest latent is shared by programs, see attention._PART_COLUMNS.
@pytest.mark.parametrize(("heads", "latent", "rope"), [(4, 48, 16), (2, 300, 8), (20, 33, 2), (1, 7, 4)])
def test_matches_reference_however_splits_are_run(rng, heads, latent, rope):
    batch = [
        (random_sequence(rng, end, torch.float32, heads=heads, latent=latent, rope=rope), begin, end)
        for begin, end in [(0, 4), (19, 20), (560, 561), (511, 514)]
    ]
    expected = attend(batch, poison=False, op=mla_attention_reference)
    serial, parallel = attend(batch, op=in_one), attend(batch, op=spread)
    for s, p, e in zip(serial, parallel, expected, strict=True):
        assert_close(s, e, scale=2.0)
        assert_same_bits(p, s)


def test_chunks_decode_and_neighbours_keep_the_bits(rng):
    sequence = random_sequence(rng, 540, torch.float32, heads=3, latent=24, rope=8)
    other = random_sequence(rng, 20, torch.float32, heads=3, latent=24, rope=8)
    (whole,) = attend([(sequence, 500, 540)], op=in_one)
    for begin, end in [(500, 511), (511, 513), (513, 540), (539, 540)]:
        for op in (in_one, spread):
            _, chunk = attend([(other, 12, 20), (sequence, begin, end)], shuffle=begin, op=op)
            assert_same_bits(chunk, whole[begin - 500 : end - 500])
    shard = type(sequence)(
        sequence.query_latent[:, 1:].contiguous(),
        sequence.query_rope[:, 1:].contiguous(),
        sequence.latent,
        sequence.rope,
    )
    assert_same_bits(attend([(shard, 530, 540)], op=mla_attention)[0], whole[-10:, 1:].contiguous())


def test_bfloat16(rng):
    batch = [(random_sequence(rng, end, torch.bfloat16, latent=32), begin, end) for begin, end in [(0, 9), (515, 518)]]
    expected = attend(batch, poison=False, op=mla_attention_reference)
    serial, parallel = attend(batch, op=in_one), attend(batch, op=spread)
    for s, p, e in zip(serial, parallel, expected, strict=True):
        # Weights meet the values in bf16, as in other flash kernels.
        assert (s.double() - e.double()).norm() < 5e-3 * e.double().norm()
        assert_same_bits(p, s)


STORED = pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)


def quantized_latents(blocks: int, latent: int, rope: int, stored: torch.dtype) -> QuantizedLatents:
    """A cache in which nothing is written."""
    values = torch.full((blocks, 16, latent), 77, dtype=torch.uint8).view(stored)
    scales = torch.full((blocks, 16), torch.nan)
    return QuantizedLatents(values, torch.full((blocks, 16, rope), torch.nan, dtype=torch.bfloat16), scales)


@STORED
def test_write_quantized_latent(rng, stored):
    down, slots = randn(9, 5 + 20 + 6, rng=rng), torch.randperm(8 * 16, generator=rng)[:9]
    slots[4] = -1
    ours, theirs = (quantized_latents(8, 20, 6, stored) for _ in range(2))
    KERNELS.write_latent(down[:, 5:25], down[:, 25:], ours, slots)
    write_latent_reference(down[:, 5:25], down[:, 25:], theirs, slots)
    for actual, expected in zip(ours, theirs, strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("stored", "dtype", "heads", "latent", "rope"),
    [
        (torch.int8, torch.float32, 4, 48, 16),
        (torch.float8_e4m3fn, torch.float32, 2, 300, 8),
        (torch.int8, torch.float32, 1, 7, 4),
        (torch.float8_e4m3fn, torch.bfloat16, 4, 48, 16),
        (torch.int8, torch.bfloat16, 2, 300, 8),
        (torch.float8_e4m3fn, torch.bfloat16, 1, 7, 4),
    ],
    ids=str,
)
def test_quantized_latents_are_those_that_they_stand_for(rng, stored, dtype, heads, latent, rope):
    sequence = random_sequence(rng, 560, dtype, heads=heads, latent=latent, rope=rope)
    cache, positions = quantized_latents(36, latent, rope, stored), torch.arange(560)
    table = 1 + torch.randperm(35, generator=rng).int()[None]
    slots = table[0, positions // 16].long() * 16 + positions % 16
    write_latent_reference(sequence.latent, sequence.rope, cache, slots)
    for begin, end in [(0, 4), (500, 520), (559, 560)]:
        index = (table, torch.tensor([0, end - begin]).int(), torch.tensor([end]).int())
        queries = sequence.query_latent[begin:end], sequence.query_rope[begin:end]
        outs = [torch.full_like(queries[0], torch.nan) for _ in range(2)]
        for out, spread_splits in zip(outs, (False, True), strict=True):
            launchers.quantized_mla_attention(*queries, *cache, *index, out, 0.2, spread_splits=spread_splits)
        assert_same_bits(*outs)
        expected = mla_attention_reference(*queries, cache, *index, 0.2)
        if dtype == torch.float32:
            assert_close(outs[0], expected, scale=2.0)
        else:  # weights meet the values in bf16
            assert (outs[0].double() - expected.double()).norm() < 5e-3 * expected.double().norm()


def test_write_latent(rng):
    down, slots = randn(9, 5 + 20 + 6, rng=rng), torch.randperm(8 * 16, generator=rng)[:9]
    slots[4] = -1
    caches = [torch.zeros(8, 16, 26) for _ in range(2)]
    KERNELS.write_latent(down[:, 5:25], down[:, 25:], caches[0], slots)
    write_latent_reference(down[:, 5:25], down[:, 25:], caches[1], slots)
    assert_same_bits(*caches)


@pytest.mark.parametrize(("heads", "columns", "depth"), [(1, 1, 1), (4, 70, 33), (3, 64, 7)])
def test_linear_heads(rng, heads, columns, depth):
    weights, x = randn(heads, columns, depth, rng=rng), randn(70, heads, depth + 5, rng=rng)[..., :depth]
    out = torch.full((70, heads, columns), torch.nan)
    KERNELS.linear_heads(x, weights, out)
    assert_close(out, linear_heads_reference(x, weights), scale=depth**0.5)
    for rows in (slice(0, 1), slice(3, 30)):
        alone = torch.full_like(out[rows, 1:], torch.nan)
        KERNELS.linear_heads(x[rows, 1:], weights[1:].contiguous(), alone)
        assert_same_bits(alone, out[rows, 1:].contiguous())
