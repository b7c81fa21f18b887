from __future__ import annotations

import pytest
import torch

from shardline import _cpu
from shardline.kernels.tensors import QuantizedRows
from shardline.weights.rows import quantize_rows, quantize_rows_reference
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn


def assert_same(actual: QuantizedRows, expected: QuantizedRows) -> None:
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.sums, expected.sums)
    assert_same_bits(actual.scales, expected.scales)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 31), (5, 32), (2, 33), (7, 100), (300, 896)])
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, m, k):
    x = randn(m, k, dtype=dtype, rng=rng) * torch.logspace(-30, 30, m)[:, None].to(dtype)
    assert_same(quantize_rows(KERNELS, x), quantize_rows_reference(x))


@pytest.mark.usefixtures("isa")
def test_a_row_does_not_depend_on_the_batch(dtype, rng):
    x = randn(300, 200, dtype=dtype, rng=rng)
    whole = quantize_rows(KERNELS, x)
    _cpu.set_num_threads(2)
    again = quantize_rows(KERNELS, x)
    _cpu.set_num_threads(1)
    assert_same(again, whole)
    for row in (0, 1, 17, 299):
        alone = quantize_rows(KERNELS, x[row : row + 1])
        assert torch.equal(alone.values[0], whole.values[row])
        assert_same_bits(alone.scales[0], whole.scales[row])


@pytest.mark.usefixtures("isa")
def test_rows_of_zeros_and_of_almost_zeros(dtype):
    rows = quantize_rows(KERNELS, torch.tensor([[0.0, -0.0], [1e-38, -1e-38]]).to(dtype))
    assert (rows.values == 0).all()
    assert (rows.scales == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.usefixtures("isa")
def test_what_is_not_finite_stays_so_and_to_its_row(dtype, rng, value):
    x = randn(3, 70, dtype=dtype, rng=rng)
    expected = quantize_rows(KERNELS, x)
    x[1, 40] = value
    rows = quantize_rows(KERNELS, x)
    assert rows.scales.isnan().tolist() == [False, True, False]
    assert (rows.values[1] == 0).all()
    assert torch.equal(rows.values[::2], expected.values[::2])


def test_strided_rows(dtype, rng):
    wide = randn(7, 90, dtype=dtype, rng=rng)
    assert_same(quantize_rows(KERNELS, wide[:, 20:60]), quantize_rows(KERNELS, wide[:, 20:60].contiguous()))


def test_no_rows(dtype):
    assert quantize_rows(KERNELS, torch.empty(0, 8, dtype=dtype)).values.shape == (0, 32)
