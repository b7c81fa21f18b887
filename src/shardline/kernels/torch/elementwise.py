"""Norms, activations and sums of rows.

torch computes some functions in another way at the end of a tensor than in its middle (sigmoid, SiLU). So exact
numerics use only those whose bits do not depend on the place; see `exactness.py`. Those of sums, products and quotients
never do.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.tensors import GROUP_SIZE
from shardline.weights.rows import quantize_rows_reference

Rows = tuple[Tensor, Tensor, Tensor]
"""Memory for quantized rows: values, scales, sums."""


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    torch.add(x, y, out=out)


def scale_rows(x: Tensor, factors: Tensor, positions: Tensor | None, out: Tensor) -> None:
    own = factors if positions is None else factors.index_select(0, positions.long())
    out.copy_(x.float() * own[:, None])


def quantize_rows(x: Tensor, values: Tensor, scales: Tensor, sums: Tensor) -> None:
    rows = quantize_rows_reference(x)
    values.copy_(rows.values)
    scales.copy_(rows.scales)
    if sums.numel():  # products with signed weights need none
        sums.copy_(rows.sums)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor | Rows,
    eps: float,
    weight_offset: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None:
    rows = _added(x, residual, summed)
    if weight_offset == 0.0:
        normed = F.rms_norm(rows, rows.shape[-1:], eps=eps)
        if isinstance(out, Tensor):
            torch.mul(normed, weight, out=out)
            return
        normed = normed * weight
    else:
        normed = (F.rms_norm(rows.float(), rows.shape[-1:], eps=eps) * (weight.float() + weight_offset)).to(x.dtype)
    _write(normed, out)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | Rows,
    eps: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None:
    rows = _added(x, residual, summed)
    exact_bias = None if bias is None else bias.float()
    _write(F.layer_norm(rows.float(), rows.shape[-1:], weight.float(), exact_bias, eps).to(x.dtype), out)


def activation(x: Tensor, out: Tensor, name: str, gated: bool, exact: bool = True) -> None:
    if gated and name == "silu" and not exact:
        gate, up = x.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)
        return
    if not gated:
        out.copy_(_activate(x.float().contiguous(), name))
        return
    gate, up = x.chunk(2, dim=-1)
    acted = _activate(gate.float().contiguous(), name).to(x.dtype)
    if name == "clamped_swish":
        out.copy_(acted.float() * (up.float().clamp(-7.0, 7.0) + 1))
    else:
        torch.mul(acted, up, out=out)


def softcap(logits: Tensor, cap: float) -> None:
    logits.copy_(cap * torch.tanh((logits / cap).contiguous()))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); x is contiguous."""
    return 1 / (1 + torch.exp(-x))


def _activate(x: Tensor, name: str) -> Tensor:
    """x: float32, contiguous"""
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "clamped_swish":
        gate = x.clamp(max=7.0)
        return gate / (1 + torch.exp(-1.702 * gate))
    if name == "relu":
        return x.clamp(min=0.0)
    if name == "relu2":
        return x.clamp(min=0.0).square()
    if name == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel
        inner = x * (x * x * 0.044715 + 1)
        return x / (1 + torch.exp(inner * (-2 * math.sqrt(2 / math.pi))))
    assert name == "gelu"
    half: Tensor = torch.special.erfc(x * -math.sqrt(0.5)) * 0.5
    return x * half


def _added(x: Tensor, residual: Tensor | None, summed: Tensor | None) -> Tensor:
    if residual is None:
        return x.contiguous()
    assert summed is not None
    return torch.add(x, residual, out=summed)


def _write(normed: Tensor, out: Tensor | Rows) -> None:
    if isinstance(out, tuple):
        quantize_rows(normed, *out)
    else:
        out.copy_(normed)


def quantized_width(in_features: int) -> int:
    """Columns of quantized rows."""
    return -(-in_features // GROUP_SIZE) * GROUP_SIZE
