from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops import dispatch
from shardline.runtime.ops.dispatch import set_isa, set_num_threads
from shardline.runtime.ops.linear_int8 import int8_weight_reference, linear_int8, linear_int8_reference, pack_int8
from shardline.runtime.ops.quantize_rows import quantize_rows

from .helpers import assert_same_bits, randn

SHAPES = [(1, 64, 64), (3, 77, 100), (6, 1, 1), (13, 1500, 65), (250, 600, 130), (31, 130, 640)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_matches_reference_bit_for_bit(dtype, rng, m, k, n, with_bias):
    x, weight = quantize_rows(randn(m, k, dtype=dtype, rng=rng)), randn(n, k, dtype=dtype, rng=rng)
    bias = randn(n, dtype=dtype, rng=rng) if with_bias else None
    packed = pack_int8(weight)
    for out_dtype in (torch.bfloat16, torch.float32):
        actual = linear_int8(x, packed, bias, out_dtype=out_dtype)
        assert_same_bits(actual, linear_int8_reference(x, weight, bias, out_dtype=out_dtype))


@pytest.mark.usefixtures("isa")
def test_sums_are_exact_to_the_longest_row(rng):
    """The largest sums of each sign, and one whose terms cancel."""
    k = 1 << 17
    ones, alternating = torch.ones(1, k), torch.ones(1, k)
    alternating[0, ::2] = -1
    x = torch.cat([ones, -ones, alternating, randn(1, k, rng=rng)])
    weight = torch.cat([ones, -ones, alternating, randn(1, k, rng=rng)])
    rows, (values, _) = quantize_rows(x), int8_weight_reference(weight)
    sums = rows.values.long() @ values.long().T
    assert sums.abs().max() == 127 * 127 * k
    assert_same_bits(linear_int8(rows, pack_int8(weight)), linear_int8_reference(rows, weight))


@pytest.mark.usefixtures("isa")
def test_a_row_does_not_depend_on_the_batch(dtype, rng):
    k, n = 150, 70
    weight, bias = pack_int8(randn(n, k, dtype=dtype, rng=rng)), randn(n, dtype=dtype, rng=rng)
    x = randn(1024, k, dtype=dtype, rng=rng)
    whole = linear_int8(quantize_rows(x), weight, bias, out_dtype=dtype)
    for m in [*range(1, 258), 1024]:
        assert_same_bits(linear_int8(quantize_rows(x[:m]), weight, bias, out_dtype=dtype), whole[:m])
    for start in (1, 5, 239, 1023):
        row = linear_int8(quantize_rows(x[start : start + 1]), weight, bias, out_dtype=dtype)
        assert_same_bits(row, whole[start : start + 1])


@pytest.mark.usefixtures("isa")
def test_a_column_does_not_depend_on_the_shard(dtype, rng):
    k, n = 1100, 200
    weight, x = randn(n, k, dtype=dtype, rng=rng), quantize_rows(randn(9, k, dtype=dtype, rng=rng))
    whole = linear_int8(x, pack_int8(weight))
    for begin, end in [(0, 1), (0, 67), (67, 134), (134, 200), (199, 200), (63, 129)]:
        assert_same_bits(linear_int8(x, pack_int8(weight[begin:end])), whole[:, begin:end])


@pytest.mark.usefixtures("isa")
def test_threads_do_not_matter(dtype, rng):
    weight = randn(500, 300, dtype=dtype, rng=rng)
    packed, x = pack_int8(weight), quantize_rows(randn(600, 300, dtype=dtype, rng=rng))
    alone = linear_int8(x, packed)
    for num_threads in (2, 3):
        set_num_threads(num_threads)
        assert_same_bits(linear_int8(x, packed), alone)
        assert torch.equal(pack_int8(weight).panels, packed.panels)
    set_num_threads(1)


def test_every_isa_gives_the_same_bits(dtype, rng):
    x, weight = randn(20, 333, dtype=dtype, rng=rng), randn(90, 333, dtype=dtype, rng=rng)
    bias = randn(90, dtype=dtype, rng=rng)
    results = []
    for name in dispatch.available_isas():
        set_isa(name)
        results.append(linear_int8(quantize_rows(x), pack_int8(weight), bias, out_dtype=dtype))
    for result in results:
        assert_same_bits(result, results[0])


@pytest.mark.usefixtures("isa")
def test_error_on_gaussian_weights(rng):
    """Rounding to 8 bits on both sides; 1.1% is what theory says for rows of a thousand normal values."""
    x, weight = randn(64, 1024, rng=rng), randn(256, 1024, rng=rng)
    exact = x.double() @ weight.double().T
    error = linear_int8(quantize_rows(x), pack_int8(weight)).double() - exact
    assert error.norm() / exact.norm() < 0.015


@pytest.mark.usefixtures("isa")
def test_zeros_and_what_is_not_finite(dtype, rng):
    x, weight = randn(4, 50, dtype=dtype, rng=rng), randn(70, 50, dtype=dtype, rng=rng)
    x[1], weight[3] = 0, 0
    x[2, 7], weight[66, 9] = float("nan"), float("inf")
    out = linear_int8(quantize_rows(x), pack_int8(weight))
    expected = torch.zeros(4, 70, dtype=torch.bool)
    expected[2, :] = expected[:, 66] = True
    assert torch.equal(out.isnan(), expected)
    assert (out[1, ~expected[1]] == 0).all()
    assert (out[[0, 1, 3], 3] == 0).all()


def test_no_rows():
    assert linear_int8(quantize_rows(torch.empty(0, 8)), pack_int8(torch.ones(5, 8))).shape == (0, 5)


def test_wrong_inputs_are_named():
    weight = pack_int8(torch.ones(5, 8))
    with pytest.raises(ValueError, match="features"):
        linear_int8(quantize_rows(torch.ones(2, 9)), weight)
    with pytest.raises(ValueError, match="131072 input features, not 131073"):
        pack_int8(torch.ones(1, (1 << 17) + 1))
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        pack_int8(torch.ones(2, 9, dtype=torch.float64))
    rows = quantize_rows(torch.ones(2, 8))
    with pytest.raises(TypeError, match="values must be int8, not uint8"):
        linear_int8(rows._replace(values=rows.values.to(torch.uint8)), weight)
