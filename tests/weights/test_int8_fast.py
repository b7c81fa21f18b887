"""What int8_fast has of its own; test_contract.py has the rest."""

from __future__ import annotations

import pytest
import torch

from shardline.weights.formats.int8_fast import Format, int8_weight_reference
from shardline.weights.rows import quantize_rows
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn

INT8 = Format()


@pytest.mark.usefixtures("isa")
def test_sums_are_exact_to_the_longest_row(rng):
    """The largest sums of each sign, and one whose terms cancel."""
    k = 1 << 17
    ones, alternating = torch.ones(1, k), torch.ones(1, k)
    alternating[0, ::2] = -1
    x = torch.cat([ones, -ones, alternating, randn(1, k, rng=rng)])
    weight = torch.cat([ones, -ones, alternating, randn(1, k, rng=rng)])
    rows, (values, _) = quantize_rows(KERNELS, x), int8_weight_reference(weight)
    sums = rows.values.long() @ values.long().T
    assert sums.abs().max() == 127 * 127 * k
    expected = INT8.multiply_reference(KERNELS, x, weight, None, torch.float32)
    assert_same_bits(INT8.pack_linear(KERNELS, weight)(rows), expected)


@pytest.mark.usefixtures("isa")
def test_error_on_gaussian_weights(rng):
    """Rounding to 8 bits on both sides; 1.1% is what theory says for rows of a thousand normal values."""
    x, weight = randn(64, 1024, rng=rng), randn(256, 1024, rng=rng)
    exact = x.double() @ weight.double().T
    error = INT8.pack_linear(KERNELS, weight)(quantize_rows(KERNELS, x)).double() - exact
    assert error.norm() / exact.norm() < 0.015


@pytest.mark.usefixtures("isa")
def test_zeros_and_what_is_not_finite(dtype, rng):
    x, weight = randn(4, 50, dtype=dtype, rng=rng), randn(70, 50, dtype=dtype, rng=rng)
    x[1], weight[3] = 0, 0
    x[2, 7], weight[66, 9] = float("nan"), float("inf")
    out = INT8.pack_linear(KERNELS, weight)(quantize_rows(KERNELS, x), out_dtype=torch.float32)
    expected = torch.zeros(4, 70, dtype=torch.bool)
    expected[2, :] = expected[:, 66] = True
    assert torch.equal(out.isnan(), expected)
    assert (out[1, ~expected[1]] == 0).all()
    assert (out[[0, 1, 3], 3] == 0).all()


def test_wrong_inputs_are_named():
    weight = INT8.pack_linear(KERNELS, torch.ones(5, 8))
    with pytest.raises(ValueError, match="131072 input features, not 131073"):
        INT8.pack_linear(KERNELS, torch.ones(1, (1 << 17) + 1))
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        INT8.pack_linear(KERNELS, torch.ones(2, 9, dtype=torch.float64))
    rows = quantize_rows(KERNELS, torch.ones(2, 8))
    with pytest.raises(TypeError, match="values must be int8, not uint8"):
        weight(rows._replace(values=rows.values.to(torch.uint8)))
