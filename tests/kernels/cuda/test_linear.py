from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline.kernels.cuda.triton.gemm import Tile
from shardline.kernels.cuda.triton.linear import launch_linear
from tests.kernels.cuda.helpers import KERNELS, linear_reference
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan)
    KERNELS.linear(x, weight, bias, out)
    return out


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 70, 32), (7, 64, 100), (130, 33, 65), (3, 1, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_reference(rng, rows, columns, depth, with_bias):
    x, weight = randn(rows, depth, rng=rng), randn(columns, depth, rng=rng)
    bias = randn(columns, rng=rng) if with_bias else None
    assert_close(linear(x, weight, bias), linear_reference(x, weight, bias), scale=depth**0.5)


def test_strided_rows_in_and_out(rng):
    x, weight = randn(5, 90, rng=rng), randn(40, 64, rng=rng)
    wide = torch.zeros(5, 100)
    KERNELS.linear(x[:, 10:74], weight, None, wide[:, 30:70])
    assert_same_bits(wide[:, 30:70].contiguous(), linear(x[:, 10:74].contiguous(), weight))
    assert not wide[:, :30].any()
    assert not wide[:, 70:].any()


def test_a_row_and_a_column_do_not_depend_on_their_neighbours_or_the_tile(rng):
    x, weight = randn(150, 100, rng=rng), randn(90, 100, rng=rng)
    whole = linear(x, weight)
    for row in (0, 63, 64, 149):
        assert_same_bits(linear(x[row : row + 1], weight), whole[row : row + 1])
    shard = weight[17:30].contiguous()
    assert_same_bits(linear(x, shard), whole[:, 17:30].contiguous())
    for tile in (Tile(16, 64, 4, 4), Tile(32, 128, 4, 4), Tile(128, 128, 8, 3)):
        out = torch.full_like(whole, torch.nan)
        launch_linear(x, weight, None, out, tile=tile)
        assert_same_bits(out, whole)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swish"])
@pytest.mark.parametrize(("rows", "width", "depth", "with_bias"), [(1, 70, 32, False), (70, 33, 100, True)])
def test_gated_products_have_the_bits_of_a_product_and_its_activation(rng, name, rows, width, depth, with_bias):
    x, weight = randn(rows, depth, rng=rng), randn(2 * width, depth, rng=rng)
    bias = randn(2 * width, rng=rng) if with_bias else None
    out, expected = torch.full((rows, width), torch.nan), torch.full((rows, width), torch.nan)
    KERNELS.linear(x, weight, bias, out, name)
    KERNELS.activation(linear(x, weight, bias), expected, name, True)
    assert_same_bits(out, expected)
