"""RMSNorm and LayerNorm over rows, alone or fused with the residual addition before them.

The residual stream is kept in the activations' dtype: x + residual is rounded before it is normalised, as eager
models do. Rows may be strided; without a residual, x may be heads [num_tokens, num_heads, head_dim] as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.runtime.ops.dispatch import kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """x [M, H] / rms(x) * (weight_offset + weight [H]).

    With no offset (Llama) the quotient is rounded to x's dtype before it meets the weight; with one (Gemma: 1.0) the
    whole product is formed in fp32 and rounded once.
    """
    on = kernels(x)
    out = on.activation_empty(x.dtype, *x.shape)
    on.rms_norm(x, weight, out, eps, weight_offset, None, None)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); all [M, H]."""
    on = kernels(x)
    out, summed = on.activation_empty(x.dtype, *x.shape), on.activation_empty(x.dtype, *x.shape)
    on.rms_norm(x, weight, out, eps, weight_offset, residual, summed)
    return out, summed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x [M, H] - mean) / std * weight [H] + bias [H], in fp32, rounded once."""
    on = kernels(x)
    out = on.activation_empty(x.dtype, *x.shape)
    on.layer_norm(x, weight, bias, out, eps, None, None)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual); all [M, H]."""
    on = kernels(x)
    out, summed = on.activation_empty(x.dtype, *x.shape), on.activation_empty(x.dtype, *x.shape)
    on.layer_norm(x, weight, bias, out, eps, residual, summed)
    return out, summed


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    exact = x.double()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if weight_offset == 0.0:
        return (normed.to(x.dtype).double() * weight.double()).to(x.dtype)
    return (normed * (weight.double() + weight_offset)).to(x.dtype)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    exact_bias = None if bias is None else bias.double()
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), exact_bias, eps).to(x.dtype)
