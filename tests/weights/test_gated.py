"""Gated products beyond what test_contract.py asks of every format: all activations, and unusual values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.models.parts import Activation
from shardline.runtime.ops.activation import gated_activation, gated_activation_reference
from shardline.weights.base import weight_format
from shardline.weights.formats import plain
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn

FORMATS = ["plain", "int8", "int8_fast", "int4_fast"]
NAMES: list[Activation] = ["silu", "gelu_tanh", "gelu", "relu", "relu2"]


def two_ops(x: Tensor, gate: Tensor, up: Tensor, name: Activation) -> Tensor:
    """In fp32, rounded at the end."""
    product = plain.Format().pack_linear(KERNELS, torch.cat([gate, up]))(x, out_dtype=torch.float32)
    return gated_activation(KERNELS, product, name).to(x.dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, name):
    m, k, width = 13, 300, 70
    x, bias = randn(m, k, dtype=dtype, rng=rng), randn(2 * width, dtype=dtype, rng=rng)
    gate, up = (0.1 * randn(width, k, rng=rng)).to(dtype), (0.1 * randn(width, k, rng=rng)).to(dtype)
    actual = plain.Format().pack_gated(KERNELS, gate, up)(x, bias, name)
    product = plain.Format().multiply_reference(KERNELS, x, torch.cat([gate, up]), bias, torch.float64)
    expected = gated_activation_reference(product, name).to(dtype)
    if dtype == torch.float32:
        assert_close(actual, expected, scale=(x.abs() @ gate.abs().T + 1) * (x.abs() @ up.abs().T + 1))
    else:  # the rounding may fall the other way
        error = (actual.double() - expected.double()).abs()
        assert (error <= 2**-7 * expected.double().abs() + 1e-5).all()
        assert (error == 0).double().mean() > 0.99


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("m", "k", "width"), [(1, 64, 32), (4, 77, 1), (9, 1500, 65), (250, 130, 111)])
@pytest.mark.usefixtures("isa")
def test_bits_of_two_ops(dtype, rng, form, m, k, width):
    """With every activation; half of them with a bias, the other half at the next shape."""
    x, gate, up = (randn(rows, k, dtype=dtype, rng=rng) for rows in (m, width, width))
    bias = randn(2 * width, dtype=dtype, rng=rng)
    packed = weight_format(form).pack_gated(KERNELS, gate, up)
    product = weight_format(form).pack_linear(KERNELS, torch.cat([gate, up]))
    for place, name in enumerate(NAMES):
        added = bias if (place + m) % 2 else None
        expected = gated_activation(KERNELS, product(x, added, out_dtype=torch.float32), name).to(dtype)
        assert_same_bits(packed(x, added, name), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("isa")
def test_tiny_and_infinite_values(dtype, name):
    # Subnormal numbers, which the rounding instruction takes for zeros; and what the activations saturate at.
    values = [1e-38, -1e-39, 3e-41, -0.0, 1e-30, 90.0, -90.0, 3e38, -3e38, torch.inf, -torch.inf]
    gate = torch.tensor(values).repeat(7)[:, None].to(dtype)
    up = torch.tensor(values).repeat_interleave(7)[:, None].to(dtype)
    x = torch.tensor([[1.0], [1e-3], [-1.0]]).to(dtype)
    actual = weight_format("plain").pack_gated(KERNELS, gate, up)(x, None, name)
    expected = two_ops(x, gate, up, name)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bits(actual.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_those_of_one_weight(form):
    gate, up = torch.ones(45, 64), torch.ones(45, 64)
    packed = weight_format(form).pack_linear(KERNELS, torch.cat([gate, up]))
    assert weight_format(form).pack_gated(KERNELS, gate, up).nbytes == packed.nbytes


def test_is_replayed(dtype, rng):
    gate, up = (randn(50, 40, dtype=dtype, rng=rng) for _ in range(2))
    packed = weight_format("plain").pack_gated(KERNELS, gate, up)
    x = randn(3, 40, dtype=dtype, rng=rng)
    program = _cpu.Program()
    program.begin()
    program.set_output(packed(x, None, "silu"))
    program.end()
    x.copy_(randn(3, 40, dtype=dtype, rng=rng))
    replayed = program.replay()
    assert replayed is not None
    assert_same_bits(replayed, two_ops(x, gate, up, "silu"))


@pytest.mark.parametrize("form", FORMATS)
def test_wrong_inputs_are_named(form):
    packed = weight_format(form).pack_gated(KERNELS, torch.ones(5, 8), torch.ones(5, 8))
    with pytest.raises(ValueError, match="x has 9 features, the weight takes 8"):
        packed(torch.ones(2, 9), None, "silu")
    with pytest.raises(ValueError, match="bias"):
        packed(torch.ones(2, 8), torch.ones(5), "silu")
    with pytest.raises(ValueError, match="unknown activation"):
        packed(torch.ones(2, 8), None, "tanh")
