"""RMSNorm and LayerNorm over rows, optionally fused with the residual addition before and the quantization after.

The residual stream is kept in the activations' dtype: x + residual is rounded before it is normalised, as eager models
do. Rows may be strided. Without a residual, x may also be heads [num_tokens, num_heads, head_dim].
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import QuantizedRows


def rms_norm(kernels: Kernels, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """x [M, H] / rms(x) * (weight_offset + weight [H]).

    Without an offset (Llama), the quotient is rounded to x's dtype before it is multiplied by the weight. With an
    offset (Gemma: 1.0), the whole product is computed in fp32 and rounded once.
    """
    out = kernels.activation_empty(x.dtype, *x.shape)
    kernels.rms_norm(x, weight, out, eps, weight_offset, None, None)
    return out


def add_rms_norm(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    quantized: bool = False,
) -> tuple[Tensor | QuantizedRows, Tensor]:
    """(rms_norm(s), s) for s = x + residual, or for s = x if residual is None; all [M, H].

    `quantized`: return the norm as `quantize_rows` of it, with the same bits; the norm itself is never written.
    """
    normed, parts, summed = _outputs(kernels, x, residual, quantized)
    kernels.rms_norm(x, weight, parts, eps, weight_offset, residual, summed)
    return normed, x if summed is None else summed


def layer_norm(kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x [M, H] - mean) / std * weight [H] + bias [H], in fp32, rounded once."""
    out = kernels.activation_empty(x.dtype, *x.shape)
    kernels.layer_norm(x, weight, bias, out, eps, None, None)
    return out


def add_layer_norm(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    quantized: bool = False,
) -> tuple[Tensor | QuantizedRows, Tensor]:
    """(layer_norm(s), s), as `add_rms_norm`."""
    normed, parts, summed = _outputs(kernels, x, residual, quantized)
    kernels.layer_norm(x, weight, bias, parts, eps, residual, summed)
    return normed, x if summed is None else summed


def _outputs(
    kernels: Kernels, x: Tensor, residual: Tensor | None, quantized: bool
) -> tuple[Tensor | QuantizedRows, Tensor | tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Empty memory for a norm's result, the same memory as kernels take it, and memory for x + residual."""
    normed: Tensor | QuantizedRows
    parts: Tensor | tuple[Tensor, Tensor, Tensor]
    if quantized:
        normed = kernels.quantized_empty(x.shape[0], x.shape[1], x.dtype)
        parts = normed[:3]
    else:
        normed = parts = kernels.activation_empty(x.dtype, *x.shape)
    return normed, parts, None if residual is None else kernels.activation_empty(x.dtype, *x.shape)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    exact = x.double()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if weight_offset == 0.0:
        return (normed.to(x.dtype).double() * weight.double()).to(x.dtype)
    return (normed * (weight.double() + weight_offset)).to(x.dtype)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    exact_bias = None if bias is None else bias.double()
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), exact_bias, eps).to(x.dtype)
