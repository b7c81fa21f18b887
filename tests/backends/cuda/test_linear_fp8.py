from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.ops.experts import expert_up
from shardline.runtime.ops.linear_fp8 import (
    linear_fp8,
    linear_fp8_reference,
    pack_fp8,
    quantize_rows_fp8_reference,
)
from shardline.runtime.ops.triton.quantize import quantize_rows_fp8
from shardline.runtime.quantization.base import quantization

from ..helpers import assert_close, assert_same_bits, randn
from ..test_experts import choose, packed


def test_rows_have_the_bytes_of_the_oracle(rng):
    x = randn(6, 90, rng=rng)[:, 5:75] * torch.tensor([1.0, 1e-5, 300.0, 0.0, 1.0, 7.0])[:, None]
    values, scales = torch.empty(6, 70, dtype=torch.float8_e4m3fn), torch.full((6,), torch.nan)
    quantize_rows_fp8(x, values, scales)
    expected_values, expected_scales = quantize_rows_fp8_reference(x)
    assert torch.equal(values.view(torch.uint8) & 127, expected_values.view(torch.uint8) & 127)
    assert torch.equal(values.float(), expected_values.float())  # zeros may differ in sign
    assert_same_bits(scales, expected_scales)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 70, 128), (5, 33, 300), (70, 64, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_reference(rng, rows, columns, depth, with_bias):
    x, weight = randn(rows, depth, rng=rng), pack_fp8(randn(columns, depth, rng=rng))
    bias = randn(columns, rng=rng) if with_bias else None
    assert_close(linear_fp8(x, weight, bias), linear_fp8_reference(x, weight, bias), scale=depth**0.5)


def test_a_row_does_not_depend_on_its_neighbours(rng):
    x, weight = randn(70, 130, rng=rng), pack_fp8(randn(40, 130, rng=rng))
    whole = linear_fp8(x, weight)
    for row in (0, 63, 69):
        assert_same_bits(linear_fp8(x[row : row + 1], weight), whole[row : row + 1])


def test_gated_is_both_products_and_then_the_gate(rng, gpu_kernels):
    x, gate, up, bias = (randn(*shape, rng=rng) for shape in ((5, 70), (33, 70), (33, 70), (66,)))
    scheme = quantization("fp8")
    both = torch.cat([scheme.pack(gate)(x, bias[:33]), scheme.pack(up)(x, bias[33:])], dim=1)
    assert_same_bits(scheme.pack_gated(gate, up)(x, bias, "silu"), gated_activation(both, "silu"))


def test_experts_have_the_bits_of_one_linear(rng, gpu_kernels):
    weights, x, ids = randn(3, 2 * 20, 70, rng=rng), randn(11, 70, rng=rng), choose(11, 3, 2, rng)
    rows = expert_up(x, ids, packed(weights, "fp8"), "silu", gated=True)
    for expert, weight in enumerate(weights):
        alone = gated_activation(quantization("fp8").pack(weight)(x), "silu")
        chosen = ids == expert
        assert_same_bits(rows[chosen.flatten()], alone[chosen.nonzero()[:, 0]])
