from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.dispatch import set_num_threads
from shardline.runtime.ops.linear_int4 import linear_int4, linear_int4_reference, pack_int4, unpack_int4
from shardline.runtime.ops.quantize_rows import GROUP_SIZE, quantize_rows

from .helpers import assert_same_bits, randn

SHAPES = [(1, 64, 64), (3, 77, 100), (6, 1, 1), (13, 1500, 65), (250, 600, 130), (31, 130, 640)]


def restored(weight: torch.Tensor) -> torch.Tensor:
    """What `pack_int4` keeps of a weight [N, K]."""
    values, steps = values_and_steps(weight)
    return (values * steps)[:, : weight.shape[1]]


def values_and_steps(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels, and what one of them is worth, both [N, K padded to whole groups]."""
    values, group_scales, column_scales = unpack_int4(pack_int4(weight))
    return values, (group_scales * column_scales[:, None]).repeat_interleave(GROUP_SIZE, dim=1)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, m, k, n, with_bias):
    x, weight = quantize_rows(randn(m, k, dtype=dtype, rng=rng)), pack_int4(randn(n, k, dtype=dtype, rng=rng))
    bias = randn(n, dtype=dtype, rng=rng) if with_bias else None
    actual = linear_int4(x, weight, bias)
    assert_same_bits(actual, linear_int4_reference(x, weight, bias))
    assert_same_bits(linear_int4(x, weight, bias, out_dtype=torch.bfloat16), actual.to(torch.bfloat16))


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
    weight, bias = pack_int4(randn(n, k, dtype=dtype, rng=rng)), randn(n, dtype=dtype, rng=rng)
    x = randn(1024, k, dtype=dtype, rng=rng)
    whole = linear_int4(quantize_rows(x), weight, bias, out_dtype=dtype)
    for m in [*range(1, 258), 1024]:
        assert_same_bits(linear_int4(quantize_rows(x[:m]), weight, bias, out_dtype=dtype), whole[:m])
    for start in (1, 5, 239, 1023):
        row = linear_int4(quantize_rows(x[start : start + 1]), weight, bias, out_dtype=dtype)
        assert_same_bits(row, whole[start : start + 1])


@pytest.mark.usefixtures("isa")
def test_a_column_does_not_depend_on_the_shard(dtype, rng):
    k, n = 1100, 200
    weight, x = randn(n, k, dtype=dtype, rng=rng), quantize_rows(randn(9, k, dtype=dtype, rng=rng))
    whole = linear_int4(x, pack_int4(weight))
    for begin, end in [(0, 1), (0, 67), (67, 134), (134, 200), (199, 200), (63, 129)]:
        assert_same_bits(linear_int4(x, pack_int4(weight[begin:end])), whole[:, begin:end])


@pytest.mark.usefixtures("isa")
def test_threads_do_not_matter(dtype, rng):
    weight = randn(500, 300, dtype=dtype, rng=rng)
    packed, x = pack_int4(weight), quantize_rows(randn(600, 300, dtype=dtype, rng=rng))
    alone = linear_int4(x, packed)
    for num_threads in (2, 3):
        set_num_threads(num_threads)
        assert_same_bits(linear_int4(x, packed), alone)
        assert torch.equal(pack_int4(weight).panels, packed.panels)
    set_num_threads(1)


@pytest.mark.usefixtures("isa")
def test_error_on_gaussian_weights(rng):
    """Sixteen levels over 32 normal values cost 8.4%, the activations' 8 bits little more."""
    x, weight = randn(64, 1024, rng=rng), randn(256, 1024, rng=rng)
    exact = x.double() @ weight.double().T
    error = linear_int4(quantize_rows(x), pack_int4(weight)).double() - exact
    assert error.norm() / exact.norm() < 0.09
    assert (restored(weight) - weight).norm() / weight.norm() < 0.085


@pytest.mark.usefixtures("isa")
def test_zeros_and_what_is_not_finite(dtype, rng):
    x, weight = randn(4, 50, dtype=dtype, rng=rng), randn(70, 50, dtype=dtype, rng=rng)
    x[1], weight[3] = 0, 0
    x[2, 7], weight[66, 9] = float("nan"), float("inf")
    out = linear_int4(quantize_rows(x), pack_int4(weight))
    expected = torch.zeros(4, 70, dtype=torch.bool)
    expected[2, :] = expected[:, 66] = True
    assert torch.equal(out.isnan(), expected)
    assert (out[1, ~expected[1]] == 0).all()
    assert (out[[0, 1, 3], 3] == 0).all()


def test_no_rows():
    assert linear_int4(quantize_rows(torch.empty(0, 8)), pack_int4(torch.ones(5, 8))).shape == (0, 5)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="features"):
        linear_int4(quantize_rows(torch.ones(2, 9)), pack_int4(torch.ones(5, 8)))
    with pytest.raises(ValueError, match="131072 input features, not 131073"):
        pack_int4(torch.ones(1, (1 << 17) + 1))
