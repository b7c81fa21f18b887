from __future__ import annotations

import pytest
import torch

from shardline.kernels.cuda.triton.quantize import quantize_rows_fp8
from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.ops.moe.experts import expert_up
from shardline.weights.formats.fp8 import Format, quantize_rows_fp8_reference
from tests.kernels.cuda.helpers import KERNELS, pack_experts
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn
from tests.runtime.ops.moe.test_experts import choose


def test_rows_have_the_bytes_of_the_oracle(rng):
    x = randn(6, 90, rng=rng)[:, 5:75] * torch.tensor([1.0, 1e-5, 300.0, 0.0, 1.0, 7.0])[:, None]
    values, scales = torch.empty(6, 70, dtype=torch.float8_e4m3fn), torch.full((6,), torch.nan)
    quantize_rows_fp8(x, values, scales)
    expected_values, expected_scales = quantize_rows_fp8_reference(x, torch.float8_e4m3fn)
    assert torch.equal(values.view(torch.uint8) & 127, expected_values.view(torch.uint8) & 127)
    assert torch.equal(values.float(), expected_values.float())  # zeros may differ in sign
    assert_same_bits(scales, expected_scales)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 70, 128), (5, 33, 300), (70, 64, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_reference(rng, rows, columns, depth, with_bias):
    x, weight = randn(rows, depth, rng=rng), randn(columns, depth, rng=rng)
    bias = randn(columns, rng=rng) if with_bias else None
    expected = Format().multiply_reference(KERNELS, x, weight, bias, x.dtype)
    assert_close(Format().pack_linear(KERNELS, weight)(x, bias), expected, scale=depth**0.5)


def test_a_row_does_not_depend_on_its_neighbours(rng):
    x, linear = randn(70, 130, rng=rng), Format().pack_linear(KERNELS, randn(40, 130, rng=rng))
    whole = linear(x)
    for row in (0, 63, 69):
        assert_same_bits(linear(x[row : row + 1]), whole[row : row + 1])


def test_gated_is_both_products_and_then_the_gate(rng):
    x, gate, up, bias = (randn(*shape, rng=rng) for shape in ((5, 70), (33, 70), (33, 70), (66,)))
    halves = ((gate, bias[:33]), (up, bias[33:]))
    both = torch.cat([Format().pack_linear(KERNELS, half)(x, its_bias) for half, its_bias in halves], dim=1)
    actual = Format().pack_gated(KERNELS, gate, up)(x, bias, "silu")
    assert_same_bits(actual, gated_activation(KERNELS, both, "silu"))


def test_experts_have_the_bits_of_one_linear(rng):
    weights, x, ids = randn(3, 2 * 20, 70, rng=rng), randn(11, 70, rng=rng), choose(11, 3, 2, rng)
    rows = expert_up(KERNELS, x, ids, pack_experts(KERNELS, weights, "fp8"), "silu", gated=True)
    for expert, weight in enumerate(weights):
        alone = gated_activation(KERNELS, Format().pack_linear(KERNELS, weight)(x), "silu")
        chosen = ids == expert
        assert_same_bits(rows[chosen.flatten()], alone[chosen.nonzero()[:, 0]])
