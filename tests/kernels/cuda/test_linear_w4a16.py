from __future__ import annotations

import pytest
import torch

from shardline.kernels.cuda.triton.gemm import Tile
from shardline.kernels.cuda.triton.linear_w4a16 import linear_w4a16 as launch
from shardline.kernels.cuda.w4a16 import W4A16Linear
from shardline.weights.base import PackedLinear
from shardline.weights.formats.packed import Format
from shardline.weights.grouped import GroupedWeight
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn

SHAPES = [(1, 70, 128, 64), (5, 33, 104, 32), (66, 64, 256, 128), (3, 40, 96, None), (2, 8, 40, 32), (70, 40, 64, 128)]
"""Rows, columns, depth and group size."""


def random_weight(rng: torch.Generator, columns: int, depth: int, group_size: int | None) -> GroupedWeight:
    size = group_size or depth
    groups = -(-depth // size)
    return GroupedWeight(
        torch.randint(0, 16, (columns, depth), generator=rng, dtype=torch.uint8),
        (torch.rand(columns, groups, generator=rng) / 8).half(),
        torch.arange(depth) // size,
        torch.randint(0, 17, (columns, groups), generator=rng, dtype=torch.uint8),
    )


def pack(*parts: GroupedWeight) -> PackedLinear:
    return Format().pack_linear(KERNELS, *parts)


def rows_of(weight: GroupedWeight, rows: slice) -> GroupedWeight:
    return weight.select_rows(rows)


@pytest.mark.parametrize(("rows", "columns", "depth", "group_size"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_reference(rng, rows, columns, depth, group_size, with_bias):
    x, weight = randn(rows, depth, rng=rng), random_weight(rng, columns, depth, group_size)
    bias = randn(columns, rng=rng) if with_bias else None
    expected = Format().multiply_reference(KERNELS, x, weight, bias, x.dtype)
    assert_close(pack(weight)(x, bias), expected, scale=depth**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "depth", "group_size"), SHAPES)
def test_bits_are_those_of_a_dense_linear(rng, rows, columns, depth, group_size, dtype):
    x, weight = randn(rows, depth, dtype=dtype, rng=rng), random_weight(rng, columns, depth, group_size)
    expected = torch.full((rows, columns), torch.nan, dtype=dtype)
    KERNELS.linear(x, weight.dequantize(dtype), None, expected)
    assert_same_bits(pack(weight)(x), expected)


def test_rows_tiles_and_shards_do_not_matter(rng):
    x, weight = randn(70, 160, rng=rng), random_weight(rng, 50, 160, 32)
    linear = pack(weight)
    assert isinstance(linear, W4A16Linear)
    whole, packed = linear(x), linear.weight
    for row in (0, 63, 69):
        assert_same_bits(linear(x[row : row + 1]), whole[row : row + 1])
    for tile in (Tile(32, 64, 4, 2), Tile(128, 64, 8, 3)):
        out = torch.full_like(whole, torch.nan)
        launch(x, packed.values, packed.scales, packed.zeros, 32, None, out, tile=tile)
        assert_same_bits(out, whole)
    shards = [rows_of(weight, slice(0, 13)), rows_of(weight, slice(13, 50))]
    parts = [pack(shard)(x) for shard in shards]
    assert_same_bits(torch.cat(parts, dim=1), whole)
    assert_same_bits(pack(*shards)(x), whole)
