from __future__ import annotations

import pytest
import torch

from shardline import _cpu
from shardline.weights.formats.int4 import Format, int4_reference
from shardline.weights.rows import GROUP_SIZE, quantize_rows
from shardline.weights.scaled import ScaledLinear
from tests.ops.helpers import KERNELS, assert_same_bits, randn

INT4 = Format()
SHAPES = [(1, 64, 64), (3, 77, 100), (6, 1, 1), (13, 1500, 65), (250, 600, 130), (31, 130, 640)]


def unpack(packed: ScaledLinear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Int4Kernels.unpack_int4`."""
    return KERNELS.unpack_int4(packed.weight.panels, packed.weight.scales, packed.out_features)


def restored(weight: torch.Tensor) -> torch.Tensor:
    """What packing keeps of a weight [N, K]."""
    values, steps = values_and_steps(weight)
    return (values * steps)[:, : weight.shape[1]]


def values_and_steps(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels, and what one of them is worth, both [N, K padded to whole groups]."""
    values, group_scales, column_scales = unpack(INT4.pack_linear(KERNELS, weight))
    return values, (group_scales * column_scales[:, None]).repeat_interleave(GROUP_SIZE, dim=1)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, m, k, n, with_bias):
    x, weight = randn(m, k, dtype=dtype, rng=rng), randn(n, k, dtype=dtype, rng=rng)
    packed, rows = INT4.pack_linear(KERNELS, weight), quantize_rows(KERNELS, x)
    bias = randn(n, dtype=dtype, rng=rng) if with_bias else None
    actual = packed(rows, bias, out_dtype=torch.float32)
    assert_same_bits(actual, int4_reference(x, *unpack(packed), bias, torch.float32))
    assert_same_bits(actual, INT4.multiply_reference(KERNELS, x, weight, bias, torch.float32))
    assert_same_bits(packed(rows, bias, out_dtype=torch.bfloat16), actual.to(torch.bfloat16))


@pytest.mark.usefixtures("isa")
def test_weights_are_the_nearest_of_sixteen_levels(dtype, rng):
    weight = randn(70, 100, dtype=dtype, rng=rng)
    values, steps = values_and_steps(weight)
    assert values.min() == -8
    assert values.max() == 7
    padded = torch.nn.functional.pad(weight.float(), (0, -100 % GROUP_SIZE))
    off = (padded - values * steps).abs()
    inside = (padded / steps).abs() < 7
    assert (off[inside] <= steps.abs()[inside] * 0.5001).all()
    assert (off <= steps.abs() * 1.51).all(), "clipping costs at most a step and a half"


@pytest.mark.usefixtures("isa")
def test_a_row_does_not_depend_on_the_batch(dtype, rng):
    k, n = 150, 70
    weight, bias = INT4.pack_linear(KERNELS, randn(n, k, dtype=dtype, rng=rng)), randn(n, dtype=dtype, rng=rng)
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
    whole = INT4.pack_linear(KERNELS, weight)(x, out_dtype=torch.float32)
    for begin, end in [(0, 1), (0, 67), (67, 134), (134, 200), (199, 200), (63, 129)]:
        assert_same_bits(INT4.pack_linear(KERNELS, weight[begin:end])(x, out_dtype=torch.float32), whole[:, begin:end])


@pytest.mark.usefixtures("isa")
def test_threads_do_not_matter(dtype, rng):
    weight = randn(500, 300, dtype=dtype, rng=rng)
    packed, x = INT4.pack_linear(KERNELS, weight), quantize_rows(KERNELS, randn(600, 300, dtype=dtype, rng=rng))
    alone = packed(x, out_dtype=torch.float32)
    for num_threads in (2, 3):
        _cpu.set_num_threads(num_threads)
        assert_same_bits(packed(x, out_dtype=torch.float32), alone)
        assert torch.equal(INT4.pack_linear(KERNELS, weight).weight.panels, packed.weight.panels)
    _cpu.set_num_threads(1)


@pytest.mark.usefixtures("isa")
def test_error_on_gaussian_weights(rng):
    """Sixteen levels over 32 normal values cost 8.4%, the activations' 8 bits little more."""
    x, weight = randn(64, 1024, rng=rng), randn(256, 1024, rng=rng)
    exact = x.double() @ weight.double().T
    error = INT4.pack_linear(KERNELS, weight)(quantize_rows(KERNELS, x)).double() - exact
    assert error.norm() / exact.norm() < 0.09
    assert (restored(weight) - weight).norm() / weight.norm() < 0.085


@pytest.mark.usefixtures("isa")
def test_zeros_and_what_is_not_finite(dtype, rng):
    x, weight = randn(4, 50, dtype=dtype, rng=rng), randn(70, 50, dtype=dtype, rng=rng)
    x[1], weight[3] = 0, 0
    x[2, 7], weight[66, 9] = float("nan"), float("inf")
    out = INT4.pack_linear(KERNELS, weight)(quantize_rows(KERNELS, x), out_dtype=torch.float32)
    expected = torch.zeros(4, 70, dtype=torch.bool)
    expected[2, :] = expected[:, 66] = True
    assert torch.equal(out.isnan(), expected)
    assert (out[1, ~expected[1]] == 0).all()
    assert (out[[0, 1, 3], 3] == 0).all()


def test_no_rows():
    assert INT4.pack_linear(KERNELS, torch.ones(5, 8))(quantize_rows(KERNELS, torch.empty(0, 8))).shape == (0, 5)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="features"):
        INT4.pack_linear(KERNELS, torch.ones(5, 8))(quantize_rows(KERNELS, torch.ones(2, 9)))
    with pytest.raises(ValueError, match="131072 input features, not 131073"):
        INT4.pack_linear(KERNELS, torch.ones(1, (1 << 17) + 1))
