"""RMSNorm and LayerNorm on the GPU: one program a row, whole rows in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.runtime.ops.triton.launch import EXACT, warps_of_row


def rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    weight_offset: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None:
    """As `ops.norm.rms_norm` into out, contiguous; given a residual, of x + residual, which goes to `summed`."""
    _launch(x, weight, None, out, eps, weight_offset, residual, summed, rms=True)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None:
    """As `ops.norm.layer_norm` into out, contiguous; given a residual, of x + residual, which goes to `summed`."""
    _launch(x, weight, bias, out, eps, 0.0, residual, summed, rms=False)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    weight_offset: float,
    residual: Tensor | None,
    summed: Tensor | None,
    *,
    rms: bool,
) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return
    per_token = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        x,
        weight,
        bias,
        out,
        residual,
        summed,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        per_token,
        0 if residual is None else residual.stride(0),
        width,
        eps,
        weight_offset,
        IS_RMS=rms,
        HAS_OFFSET=weight_offset != 0.0,
        BLOCK=block,
        num_warps=warps_of_row(block),
        **EXACT,
    )


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    residual_ptr,
    summed_ptr,
    token_stride,
    head_stride,
    per_token,
    residual_stride,
    width,
    eps,
    weight_offset,
    IS_RMS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    stored = out_ptr.dtype.element_ty
    x_row = x_ptr + row // per_token * token_stride + row % per_token * head_stride
    x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + residual).to(stored)
        tl.store(summed_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if IS_RMS:
        mean_square = tl.div_rn(tl.sum(x * x, axis=0), width.to(tl.float32))
        normed = x * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
        # Llama rounds before it multiplies by the weight; Gemma multiplies by 1 + weight in fp32.
        y = normed * (weight + weight_offset) if HAS_OFFSET else normed.to(stored).to(tl.float32) * weight
    else:
        mean = tl.div_rn(tl.sum(x, axis=0), width.to(tl.float32))
        centred = tl.where(inside, x - mean, 0.0)
        variance = tl.div_rn(tl.sum(centred * centred, axis=0), width.to(tl.float32))
        y = centred * tl.div_rn(1.0, tl.sqrt_rn(variance + eps)) * weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, y.to(stored), mask=inside)
