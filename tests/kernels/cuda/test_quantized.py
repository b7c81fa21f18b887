"""Products of bytes have the bits of the CPU's."""

from __future__ import annotations

import pytest
import torch

from shardline.kernels.tensors import QuantizedRows
from shardline.runtime.ops.activation import activation, gated_activation
from shardline.runtime.ops.moe.experts import expert_up
from shardline.runtime.ops.norm import add_layer_norm, add_rms_norm
from shardline.weights.base import weight_format
from shardline.weights.rows import quantize_rows, quantize_rows_reference
from tests.kernels.cuda.helpers import KERNELS, pack_experts
from tests.runtime.ops.helpers import KERNELS as HOST_KERNELS
from tests.runtime.ops.helpers import assert_same_bits, randn
from tests.runtime.ops.moe.test_experts import choose

SHAPES = [(1, 70, 32), (5, 33, 300), (66, 64, 129), (3, 8, 64)]


def test_rows_have_the_bytes_of_the_oracle(rng):
    sizes = torch.tensor([1.0, 1e-5, 300.0, 0.0, 1e-37, 7.0, 1.0, 1.0, 1.0])
    x = randn(9, 110, rng=rng)[:, 5:75] * sizes[:, None]
    x[6, 3], x[7, 0], x[8, 9] = torch.nan, torch.inf, -torch.inf
    x[0, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.5, -127.0])  # halves go to even numbers
    expected, actual = quantize_rows_reference(x), quantize_rows(KERNELS, x)
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.scales.isnan(), expected.scales.isnan())
    assert_same_bits(actual.scales.nan_to_num(), expected.scales.nan_to_num())
    assert actual.values.shape == (9, 96)
    assert actual.sums.numel() == 0


@pytest.mark.parametrize("width", [5, 70, 120])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_norm_quantizes_its_rows_as_they_are_afterwards(rng, width, with_residual):
    x, weight = randn(6, width + 9, rng=rng)[:, 4 : 4 + width], randn(width, rng=rng)
    x[3], x[4, 2] = 0.0, torch.nan
    residual = randn(6, width, rng=rng) * torch.tensor([1.0, 1e-5, 300.0, 0.0, 1.0, 1.0])[:, None]
    added = residual if with_residual else None
    for norm in (
        lambda quantized: add_rms_norm(KERNELS, x, added, weight, 1e-6, quantized=quantized),
        lambda quantized: add_layer_norm(KERNELS, x, added, weight, weight, 1e-6, quantized=quantized),
    ):
        (rows, summed), (normed, expected_sum) = norm(True), norm(False)
        expected = quantize_rows(KERNELS, normed)
        assert torch.equal(summed.nan_to_num(), expected_sum.nan_to_num())
        assert isinstance(rows, QuantizedRows)
        assert torch.equal(rows.values, expected.values)
        assert torch.equal(rows.scales.isnan(), expected.scales.isnan())
        assert_same_bits(rows.scales.nan_to_num(), expected.scales.nan_to_num())


@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_int8_has_the_bits_of_the_oracle(rng, rows, columns, depth, out_dtype):
    x, weight, bias = randn(rows, depth, rng=rng), randn(columns, depth, rng=rng), randn(columns, rng=rng)
    weight[2] = 0.0
    int8 = weight_format("int8_fast")
    packed = int8.pack_linear(KERNELS, weight)
    for added in (None, bias):
        expected = int8.multiply_reference(KERNELS, x, weight, added, out_dtype)
        assert_same_bits(packed(quantize_rows(KERNELS, x), added, out_dtype=out_dtype), expected)


@pytest.mark.parametrize("name", ["int8_fast", "int4_fast"])
def test_a_gated_linear_has_the_bits_of_both_products_and_then_the_gate(rng, name):
    x, bias = randn(5, 70, rng=rng), randn(80, rng=rng)
    gate, up = randn(40, 70, rng=rng), randn(40, 70, rng=rng)
    format = weight_format(name)
    both = format.pack_linear(KERNELS, torch.cat([gate, up]))(x, bias)
    actual = format.pack_gated(KERNELS, gate, up)(x, bias, "silu")
    assert_same_bits(actual, gated_activation(KERNELS, both, "silu"))


@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_int4_has_the_bits_of_the_cpu(rng, rows, columns, depth):
    x, weight, bias = randn(rows, depth, rng=rng), randn(columns, depth, rng=rng), randn(columns, rng=rng)
    weight[2] = 0.0
    theirs, ours = (weight_format("int4_fast").pack_linear(kernels, weight) for kernels in (HOST_KERNELS, KERNELS))
    for added in (None, bias):
        expected = theirs(quantize_rows(HOST_KERNELS, x), added)
        assert_same_bits(ours(quantize_rows(KERNELS, x), added), expected)


@pytest.mark.parametrize("scheme", ["int8_fast", "int4_fast"])
def test_rows_of_experts_have_the_bits_of_one_linear(rng, scheme):
    weights, x, ids = randn(3, 2 * 20, 70, rng=rng), randn(11, 70, rng=rng), choose(11, 3, 2, rng)
    rows = expert_up(KERNELS, x, ids, pack_experts(KERNELS, weights, scheme), "silu", gated=False)
    for expert, weight in enumerate(weights):
        alone = activation(KERNELS, weight_format(scheme).pack_linear(KERNELS, weight)(x), "silu")
        chosen = ids == expert
        assert_same_bits(rows[chosen.flatten()], alone[chosen.nonzero()[:, 0]])
