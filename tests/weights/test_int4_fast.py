"""What int4_fast has of its own; test_contract.py has the rest."""

from __future__ import annotations

import pytest
import torch

from shardline.kernels.tensors import GROUP_SIZE
from shardline.weights.formats.int4_fast import Format
from shardline.weights.rows import quantize_rows
from shardline.weights.scaled import ScaledLinear
from tests.runtime.ops.helpers import KERNELS, randn

INT4 = Format()


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


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="131072 input features, not 131073"):
        INT4.pack_linear(KERNELS, torch.ones(1, (1 << 17) + 1))
