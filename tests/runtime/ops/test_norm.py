from __future__ import annotations

import pytest
import torch

from shardline import _cpu
from shardline.kernels.tensors import QuantizedRows
from shardline.runtime.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from shardline.weights.rows import quantize_rows
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn

WIDTHS = [1, 5, 64, 127, 1024, 3000]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.usefixtures("isa")
def test_rms_norm(dtype, rng, width, weight_offset):
    x, weight = randn(7, width, dtype=dtype, rng=rng), randn(width, dtype=dtype, rng=rng)
    actual = rms_norm(KERNELS, x, weight, 1e-6, weight_offset=weight_offset)
    expected = rms_norm_reference(x, weight, 1e-6, weight_offset=weight_offset)
    assert_close(actual, expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_layer_norm(dtype, rng, width, with_bias):
    x, weight = randn(7, width, dtype=dtype, rng=rng) + 3, randn(width, dtype=dtype, rng=rng)
    bias = randn(width, dtype=dtype, rng=rng) if with_bias else None
    scale = 10 * (weight.double().abs() + 1)
    assert_close(layer_norm(KERNELS, x, weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5), scale=scale)


@pytest.mark.usefixtures("isa")
def test_fused_addition_is_the_addition_then_the_norm(dtype, rng):
    x, residual = randn(5, 200, dtype=dtype, rng=rng), randn(5, 200, dtype=dtype, rng=rng)
    weight, bias = randn(200, dtype=dtype, rng=rng), randn(200, dtype=dtype, rng=rng)
    normed, summed = add_rms_norm(KERNELS, x, residual, weight, 1e-6)
    assert isinstance(normed, torch.Tensor)
    assert_same_bits(summed, x + residual)
    assert_same_bits(normed, rms_norm(KERNELS, summed, weight, 1e-6))
    normed, summed = add_layer_norm(KERNELS, x, residual, weight, bias, 1e-6)
    assert isinstance(normed, torch.Tensor)
    assert_same_bits(summed, x + residual)
    assert_same_bits(normed, layer_norm(KERNELS, summed, weight, bias, 1e-6))


def test_without_a_residual_the_sum_is_what_was_normed(dtype, rng):
    x, weight = randn(5, 200, dtype=dtype, rng=rng), randn(200, dtype=dtype, rng=rng)
    for (normed, summed), expected in (
        (
            add_rms_norm(KERNELS, x, None, weight, 1e-6, weight_offset=1.0),
            rms_norm(KERNELS, x, weight, 1e-6, weight_offset=1.0),
        ),
        (add_layer_norm(KERNELS, x, None, weight, weight, 1e-6), layer_norm(KERNELS, x, weight, weight, 1e-6)),
    ):
        assert summed is x
        assert isinstance(normed, torch.Tensor)
        assert_same_bits(normed, expected)


def assert_quantized_after_the_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Every norm that quantizes its rows has the bytes, scales and sums of one that is quantized afterwards."""
    for norm in (
        lambda quantized: add_rms_norm(KERNELS, x, residual, weight, 1e-6, quantized=quantized),
        lambda quantized: add_rms_norm(KERNELS, x, residual, weight, 1e-6, weight_offset=1.0, quantized=quantized),
        lambda quantized: add_layer_norm(KERNELS, x, residual, weight, weight, 1e-6, quantized=quantized),
        lambda quantized: add_layer_norm(KERNELS, x, residual, weight, None, 1e-6, quantized=quantized),
    ):
        (rows, summed), (normed, expected_sum) = norm(True), norm(False)
        expected = quantize_rows(KERNELS, normed)
        assert isinstance(rows, QuantizedRows)
        assert_same_bits(summed, expected_sum)
        assert torch.equal(rows.values, expected.values)
        assert torch.equal(rows.sums, expected.sums)
        assert_same_bits(rows.scales, expected.scales)
        assert rows[3:] == (x.shape[1], x.dtype)


@pytest.mark.parametrize("width", [*WIDTHS, 31, 33, 896])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.usefixtures("isa")
def test_quantizing_norm_is_the_norm_then_quantize_rows(dtype, rng, width, with_residual):
    wide = randn(9, width + 3, dtype=dtype, rng=rng) * torch.logspace(-12, 12, 9)[:, None].to(dtype)
    x = wide[:, 2 : 2 + width]  # strided rows
    residual = randn(9, width, dtype=dtype, rng=rng) * wide[:, :1] if with_residual else None
    assert_quantized_after_the_norm(x, residual, randn(width, dtype=dtype, rng=rng))


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.usefixtures("isa")
def test_rows_that_quantize_to_nothing(dtype, rng, value):
    x, weight = randn(3, 70, dtype=dtype, rng=rng), randn(70, dtype=dtype, rng=rng)
    x[1] = value
    assert_quantized_after_the_norm(x, None, weight)


@pytest.mark.usefixtures("isa", "two_threads")
def test_quantizing_norm_for_every_number_of_rows(dtype, rng):
    x, weight = randn(257, 131, dtype=dtype, rng=rng), randn(131, dtype=dtype, rng=rng)
    residual = randn(257, 131, dtype=dtype, rng=rng)
    for m in range(1, 258):
        assert_quantized_after_the_norm(x[:m], residual[:m], weight)


def test_heads_are_not_quantized(rng):
    x, weight = randn(2, 3, 8, rng=rng), torch.ones(8)
    rows = quantize_rows(KERNELS, torch.empty(6, 8))
    with pytest.raises(ValueError, match="shape"):
        _cpu.rms_norm(x, weight, rows[:3], 1e-6, 0.0, None, None)
    with pytest.raises(ValueError, match="values, scales and sums"):
        _cpu.rms_norm(x[0], weight, rows[:2], 1e-6, 0.0, None, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("isa", "two_threads")
def test_a_row_does_not_depend_on_its_neighbours(dtype, rng):
    x, weight = randn(300, 130, dtype=dtype, rng=rng), randn(130, dtype=dtype, rng=rng)
    rms, layer = rms_norm(KERNELS, x, weight, 1e-6), layer_norm(KERNELS, x, weight, weight, 1e-6)
    for row in (0, 1, 150, 299):
        assert_same_bits(rms_norm(KERNELS, x[row : row + 1], weight, 1e-6), rms[row : row + 1])
        assert_same_bits(layer_norm(KERNELS, x[row : row + 1], weight, weight, 1e-6), layer[row : row + 1])


def test_heads_of_a_fused_projection(dtype, rng):
    qkv, weight = randn(4, 6 * 32, dtype=dtype, rng=rng), randn(32, dtype=dtype, rng=rng)
    last_head = qkv[:, 5 * 32 :]  # strided rows
    assert_same_bits(
        rms_norm(KERNELS, last_head, weight, 1e-6), rms_norm(KERNELS, last_head.contiguous(), weight, 1e-6)
    )
    heads = qkv.view(4, 6, 32)[:, 1:4]
    for norm in (lambda x: rms_norm(KERNELS, x, weight, 1e-6), lambda x: layer_norm(KERNELS, x, weight, weight, 1e-6)):
        assert_same_bits(norm(heads), norm(heads.reshape(-1, 32)).view(4, 3, 32))


def test_agrees_with_llama_in_bfloat16(rng):
    """The rounding of the models' own code: to bf16 before the weight."""
    x, weight = randn(64, 512, dtype=torch.bfloat16, rng=rng), randn(512, dtype=torch.bfloat16, rng=rng)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert (rms_norm(KERNELS, x, weight, 1e-6) == expected).double().mean() > 0.999
