"""Activation functions: act(x), or gated, act(gate) * up."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels

ActivationName = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swish"]
"""gelu is the exact one (erf); gelu_tanh is also known as gelu_new and gelu_pytorch_tanh. For clamped_swish see
`models.spec.Activation`."""


def activation(kernels: Kernels, x: Tensor, name: ActivationName) -> Tensor:
    """act(x) for x [M, I], computed in fp32 and rounded once."""
    out = kernels.activation_empty(x.dtype, *x.shape)
    kernels.activation(x, out, name, False)
    return out


def gated_activation(kernels: Kernels, gate_up: Tensor, name: ActivationName) -> Tensor:
    """act(gate) * up: [M, I], for gate_up [M, 2 * I] with the gate in the first half.

    Rounded after the activation and after the product, as eager models do.
    """
    out = kernels.activation_empty(gate_up.dtype, gate_up.shape[0], gate_up.shape[1] // 2)
    kernels.activation(gate_up, out, name, True)
    return out


def gate_heads(kernels: Kernels, x: Tensor, gate: Tensor) -> None:
    """x [T, H, D] *= sigmoid(gate [T, H, D]), whose heads may be strided. Rounded after the sigmoid and after the
    product, as eager models do."""
    kernels.gate_heads(x, gate)


def activation_reference(x: Tensor, name: ActivationName) -> Tensor:
    exact = x.double()
    if name == "silu":
        y = torch.nn.functional.silu(exact)
    elif name == "clamped_swish":
        gate = exact.clamp(max=7.0)
        y = gate * torch.sigmoid(1.702 * gate)
    elif name == "relu":
        y = exact.relu()
    elif name == "relu2":
        y = exact.relu() ** 2
    elif name == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel
        y = exact * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3))
    else:  # (1 + erf(u)) / 2 = erfc(-u) / 2
        y = exact * torch.special.erfc(-exact / math.sqrt(2)) / 2
    return y.to(x.dtype)


def gated_activation_reference(gate_up: Tensor, name: ActivationName) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if name == "clamped_swish":
        return (activation_reference(gate, name).double() * (up.double().clamp(-7.0, 7.0) + 1)).to(gate_up.dtype)
    return (activation_reference(gate, name).double() * up.double()).to(gate_up.dtype)
