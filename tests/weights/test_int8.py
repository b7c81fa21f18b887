from __future__ import annotations

import pytest
import torch

from shardline import _cpu
from shardline.weights.formats.int8 import Format, int8_weight_reference
from shardline.weights.rows import quantize_rows
from tests.ops.helpers import KERNELS, assert_same_bits, randn

INT8 = Format()
SHAPES = [(1, 64, 64), (3, 77, 100), (6, 1, 1), (13, 1500, 65), (250, 600, 130), (31, 130, 640)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_matches_reference_bit_for_bit(dtype, rng, m, k, n, with_bias):
    x, weight = randn(m, k, dtype=dtype, rng=rng), randn(n, k, dtype=dtype, rng=rng)
    bias = randn(n, dtype=dtype, rng=rng) if with_bias else None
    packed = INT8.pack_linear(KERNELS, weight)
    for out_dtype in (torch.bfloat16, torch.float32):
        actual = packed(quantize_rows(KERNELS, x), bias, out_dtype=out_dtype)
        assert_same_bits(actual, INT8.multiply_reference(KERNELS, x, weight, bias, out_dtype))


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
def test_a_row_does_not_depend_on_the_batch(dtype, rng):
    k, n = 150, 70
    weight, bias = INT8.pack_linear(KERNELS, randn(n, k, dtype=dtype, rng=rng)), randn(n, dtype=dtype, rng=rng)
    x = randn(1024, k, dtype=dtype, rng=rng)
    whole = weight(quantize_rows(KERNELS, x), bias, out_dtype=dtype)
    for m in [*range(1, 258), 1024]:
        assert_same_bits(weight(quantize_rows(KERNELS, x[:m]), bias, out_dtype=dtype), whole[:m])
    for start in (1, 5, 239, 1023):
        row = weight(quantize_rows(KERNELS, x[start : start + 1]), bias, out_dtype=dtype)
        assert_same_bits(row, whole[start : start + 1])


@pytest.mark.usefixtures("isa")
def test_a_column_does_not_depend_on_the_shard(dtype, rng):
    k, n = 1100, 200
    weight, x = randn(n, k, dtype=dtype, rng=rng), quantize_rows(KERNELS, randn(9, k, dtype=dtype, rng=rng))
    whole = INT8.pack_linear(KERNELS, weight)(x, out_dtype=torch.float32)
    for begin, end in [(0, 1), (0, 67), (67, 134), (134, 200), (199, 200), (63, 129)]:
        assert_same_bits(INT8.pack_linear(KERNELS, weight[begin:end])(x, out_dtype=torch.float32), whole[:, begin:end])


@pytest.mark.usefixtures("isa")
def test_threads_do_not_matter(dtype, rng):
    weight = randn(500, 300, dtype=dtype, rng=rng)
    packed, x = INT8.pack_linear(KERNELS, weight), quantize_rows(KERNELS, randn(600, 300, dtype=dtype, rng=rng))
    alone = packed(x, out_dtype=torch.float32)
    for num_threads in (2, 3):
        _cpu.set_num_threads(num_threads)
        assert_same_bits(packed(x, out_dtype=torch.float32), alone)
        assert torch.equal(INT8.pack_linear(KERNELS, weight).weight.panels, packed.weight.panels)
    _cpu.set_num_threads(1)


def test_every_isa_gives_the_same_bits(dtype, rng):
    x, weight = randn(20, 333, dtype=dtype, rng=rng), randn(90, 333, dtype=dtype, rng=rng)
    bias = randn(90, dtype=dtype, rng=rng)
    results = []
    for name in _cpu.available_isas():
        _cpu.set_isa(name)
        results.append(INT8.pack_linear(KERNELS, weight)(quantize_rows(KERNELS, x), bias, out_dtype=dtype))
    for result in results:
        assert_same_bits(result, results[0])


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


def test_no_rows():
    assert INT8.pack_linear(KERNELS, torch.ones(5, 8))(quantize_rows(KERNELS, torch.empty(0, 8))).shape == (0, 5)


def test_wrong_inputs_are_named():
    weight = INT8.pack_linear(KERNELS, torch.ones(5, 8))
    with pytest.raises(ValueError, match="features"):
        weight(quantize_rows(KERNELS, torch.ones(2, 9)))
    with pytest.raises(ValueError, match="131072 input features, not 131073"):
        INT8.pack_linear(KERNELS, torch.ones(1, (1 << 17) + 1))
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        INT8.pack_linear(KERNELS, torch.ones(2, 9, dtype=torch.float64))
    rows = quantize_rows(KERNELS, torch.ones(2, 8))
    with pytest.raises(TypeError, match="values must be int8, not uint8"):
        weight(rows._replace(values=rows.values.to(torch.uint8)))
