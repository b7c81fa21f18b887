"""Products of bytes have the bits of the CPU's."""

from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.activation import activation, gated_activation
from shardline.runtime.ops.experts import expert_up
from shardline.runtime.ops.linear_int4 import linear_int4, pack_int4
from shardline.runtime.ops.linear_int8 import linear_int8, linear_int8_reference, pack_int8
from shardline.runtime.ops.norm import add_layer_norm, add_rms_norm
from shardline.runtime.ops.quantize_rows import quantize_rows, quantize_rows_reference
from shardline.runtime.quantization.base import quantization

from ..helpers import assert_same_bits, randn
from ..test_experts import choose, packed

SHAPES = [(1, 70, 32), (5, 33, 300), (66, 64, 129), (3, 8, 64)]


def test_rows_have_the_bytes_of_the_oracle(rng, gpu_kernels):
    sizes = torch.tensor([1.0, 1e-5, 300.0, 0.0, 1e-37, 7.0, 1.0, 1.0, 1.0])
    x = randn(9, 110, rng=rng)[:, 5:75] * sizes[:, None]
    x[6, 3], x[7, 0], x[8, 9] = torch.nan, torch.inf, -torch.inf
    x[0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.5, -127.0])  # halves go to even numbers
    expected, actual = quantize_rows_reference(x), quantize_rows(x)
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.scales.isnan(), expected.scales.isnan())
    assert_same_bits(actual.scales.nan_to_num(), expected.scales.nan_to_num())
    assert actual.values.shape == (9, 96)
    assert actual.sums.numel() == 0


@pytest.mark.parametrize("width", [5, 70, 120])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_norm_quantizes_its_rows_as_they_are_afterwards(rng, gpu_kernels, width, with_residual):
    x, weight = randn(6, width + 9, rng=rng)[:, 4 : 4 + width], randn(width, rng=rng)
    x[3], x[4, 2] = 0.0, torch.nan
    residual = randn(6, width, rng=rng) * torch.tensor([1.0, 1e-5, 300.0, 0.0, 1.0, 1.0])[:, None]
    added = residual if with_residual else None
    for norm in (
        lambda quantized: add_rms_norm(x, added, weight, 1e-6, quantized=quantized),
        lambda quantized: add_layer_norm(x, added, weight, weight, 1e-6, quantized=quantized),
    ):
        (rows, summed), (normed, expected_sum) = norm(True), norm(False)
        expected = quantize_rows(normed)
        assert torch.equal(summed.nan_to_num(), expected_sum.nan_to_num())
        assert torch.equal(rows.values, expected.values)
        assert torch.equal(rows.scales.isnan(), expected.scales.isnan())
        assert_same_bits(rows.scales.nan_to_num(), expected.scales.nan_to_num())


@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_int8_has_the_bits_of_the_oracle(rng, gpu_kernels, rows, columns, depth, out_dtype):
    x, weight, bias = randn(rows, depth, rng=rng), randn(columns, depth, rng=rng), randn(columns, rng=rng)
    weight[2] = 0.0
    for added in (None, bias):
        expected = linear_int8_reference(quantize_rows_reference(x), weight, added, out_dtype=out_dtype)
        assert_same_bits(linear_int8(quantize_rows(x), pack_int8(weight), added, out_dtype=out_dtype), expected)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_gated_linear_has_the_bits_of_both_products_and_then_the_gate(rng, gpu_kernels, name):
    x, bias = randn(5, 70, rng=rng), randn(80, rng=rng)
    gate, up = randn(40, 70, rng=rng), randn(40, 70, rng=rng)
    scheme = quantization(name)
    both = scheme.pack(torch.cat([gate, up]))(x, bias)
    assert_same_bits(scheme.pack_gated(gate, up)(x, bias, "silu"), gated_activation(both, "silu"))


@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_int4_has_the_bits_of_the_cpu(rng, request, rows, columns, depth):
    x, weight, bias = randn(rows, depth, rng=rng), randn(columns, depth, rng=rng), randn(columns, rng=rng)
    weight[2] = 0.0
    expected = [linear_int4(quantize_rows(x), pack_int4(weight), added) for added in (None, bias)]
    request.getfixturevalue("gpu_kernels")
    for added, product in zip((None, bias), expected, strict=True):
        assert_same_bits(linear_int4(quantize_rows(x), pack_int4(weight), added), product)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_rows_of_experts_have_the_bits_of_one_linear(rng, gpu_kernels, scheme):
    weights, x, ids = randn(3, 2 * 20, 70, rng=rng), randn(11, 70, rng=rng), choose(11, 3, 2, rng)
    rows = expert_up(x, ids, packed(weights, scheme), "silu", gated=False)
    for expert, weight in enumerate(weights):
        alone = activation(quantization(scheme).pack(weight)(x), "silu")
        chosen = ids == expert
        assert_same_bits(rows[chosen.flatten()], alone[chosen.nonzero()[:, 0]])
