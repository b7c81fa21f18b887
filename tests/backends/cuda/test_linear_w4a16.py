from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops import triton as ops
from shardline.runtime.ops.grouped_weight import GroupedWeight, stacked_weights
from shardline.runtime.ops.linear_w4a16 import linear_w4a16, linear_w4a16_reference, pack_w4a16
from shardline.runtime.ops.triton.gemm import Tile
from shardline.runtime.ops.triton.linear_w4a16 import linear_w4a16 as launch

from ..helpers import assert_close, assert_same_bits, randn

SHAPES = [(1, 70, 128, 64), (5, 33, 104, 32), (66, 64, 256, 128), (3, 40, 96, None), (2, 8, 40, 32), (70, 40, 64, 128)]
"""Rows, columns, depth and group size."""


def random_weight(rng: torch.Generator, columns: int, depth: int, group_size: int | None) -> GroupedWeight:
    size = group_size or depth
    groups = -(-depth // size)
    return GroupedWeight(
        torch.randint(0, 16, (columns, depth), generator=rng, dtype=torch.uint8),
        (torch.rand(columns, groups, generator=rng) / 8).half(),
        torch.randint(0, 17, (columns, groups), generator=rng, dtype=torch.uint8),
        torch.arange(depth) // size,
    )


def rows_of(weight: GroupedWeight, rows: slice) -> GroupedWeight:
    return GroupedWeight(weight.values[rows], weight.scales[rows], weight.zeros[rows], weight.group_of)


@pytest.mark.parametrize(("rows", "columns", "depth", "group_size"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_reference(rng, rows, columns, depth, group_size, with_bias):
    x, weight = randn(rows, depth, rng=rng), random_weight(rng, columns, depth, group_size)
    bias = randn(columns, rng=rng) if with_bias else None
    actual = linear_w4a16(x, pack_w4a16(weight), bias)
    assert_close(actual, linear_w4a16_reference(x, weight, bias), scale=depth**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "depth", "group_size"), SHAPES)
def test_bits_are_those_of_a_dense_linear(rng, rows, columns, depth, group_size, dtype):
    x, weight = randn(rows, depth, dtype=dtype, rng=rng), random_weight(rng, columns, depth, group_size)
    expected = torch.full((rows, columns), torch.nan, dtype=dtype)
    ops.linear(x, weight.dequantized(dtype), None, expected)
    assert_same_bits(linear_w4a16(x, pack_w4a16(weight)), expected)


def test_rows_tiles_and_shards_do_not_matter(rng):
    x, weight = randn(70, 160, rng=rng), random_weight(rng, 50, 160, 32)
    packed = pack_w4a16(weight)
    whole = linear_w4a16(x, packed)
    for row in (0, 63, 69):
        assert_same_bits(linear_w4a16(x[row : row + 1], packed), whole[row : row + 1])
    for tile in (Tile(64, 32, 4, 2), Tile(128, 64, 8, 3)):
        out = torch.full_like(whole, torch.nan)
        launch(x, packed.values, packed.scales, packed.zeros, 32, None, out, tile=tile)
        assert_same_bits(out, whole)
    shards = [rows_of(weight, slice(0, 13)), rows_of(weight, slice(13, 50))]
    parts = [linear_w4a16(x, pack_w4a16(shard)) for shard in shards]
    assert_same_bits(torch.cat(parts, dim=1), whole)
    assert_same_bits(linear_w4a16(x, pack_w4a16(stacked_weights(shards))), whole)
