from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.activation import (
    activation,
    activation_reference,
    gated_activation,
    gated_activation_reference,
)
from shardline.runtime.ops.sampling.softcap import softcap_, softcap_reference
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn

NAMES = ["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swish"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("isa")
def test_over_the_whole_range(dtype, name):
    x = torch.linspace(-12, 30, 40001).to(dtype)[None]
    assert_close(activation(KERNELS, x, name), activation_reference(x, name))


@pytest.mark.parametrize("name", NAMES)
def test_special_values(isa, name):
    x = torch.tensor([[0.0, -0.0, 1e-30, 200.0, torch.nan, 3e38]])
    torch.testing.assert_close(activation(KERNELS, x, name), activation_reference(x, name), equal_nan=True)
    assert activation(KERNELS, torch.tensor([[-200.0]]), name).abs().item() < 1e-30


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 15, 64, 9000])
@pytest.mark.usefixtures("isa")
def test_gated(dtype, rng, name, width):
    gate_up = randn(3, 2 * width, dtype=dtype, rng=rng)
    expected = gated_activation_reference(gate_up, name)
    size = gate_up[:, width:].double().abs() + (name == "clamped_swish")
    assert_close(gated_activation(KERNELS, gate_up, name), expected, scale=size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("isa", "two_threads")
def test_an_element_does_not_depend_on_its_place(dtype, rng, name):
    x = randn(40, 501, dtype=dtype, rng=rng)
    whole = activation(KERNELS, x, name)
    for begin, end in [(0, 1), (3, 20), (450, 501)]:
        assert_same_bits(activation(KERNELS, x[5:6, begin:end], name), whole[5:6, begin:end])


@pytest.mark.usefixtures("isa")
def test_softcap(rng):
    logits = randn(3, 50021, rng=rng) * 30
    expected = softcap_reference(logits, 30.0)
    one = softcap_(KERNELS, logits[1, 7:8].clone(), 30.0)
    assert softcap_(KERNELS, logits, 30.0) is logits
    assert_close(logits, expected)
    assert_same_bits(logits[1, 7:8], one)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        activation(KERNELS, torch.ones(1, 1), "swish")  # type: ignore[arg-type]
