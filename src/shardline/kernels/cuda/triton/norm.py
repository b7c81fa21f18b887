"""RMSNorm and LayerNorm on the GPU: one program per row, with the whole row in registers.

An RMSNorm adds squares of neighbours in pairs, then pairs of these sums, and so on: an order that no layout of the row
over threads changes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import begin_early, early_options, warps_of_row
from shardline.kernels.cuda.triton.quantize import as_bytes
from shardline.kernels.tensors import GROUP_SIZE


def rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor | tuple[Tensor, Tensor, Tensor],
    eps: float,
    weight_offset: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None:
    """As `ops.norm.rms_norm`, into a contiguous out; or, if out has three tensors, quantized as by
    `weights.rows.quantize_rows`, into values and scales. With a residual, the norm of x + residual, which is stored in
    `summed`."""
    _launch(x, weight, None, out, eps, weight_offset, residual, summed, rms=True)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | tuple[Tensor, Tensor, Tensor],
    eps: float,
    residual: Tensor | None,
    summed: Tensor | None,
) -> None:
    """As `ops.norm.layer_norm`, into a contiguous out; or, if out has three tensors, quantized as by
    `weights.rows.quantize_rows`, into values and scales. With a residual, the norm of x + residual, which is stored in
    `summed`."""
    _launch(x, weight, bias, out, eps, 0.0, residual, summed, rms=False)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | tuple[Tensor, Tensor, Tensor],
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
    values, scales = out[:2] if isinstance(out, tuple) else (out, None)
    block = max(triton.next_power_of_2(width), GROUP_SIZE)  # one order of the sum, whether or not rows are quantized
    _norm_kernel[(num_rows,)](
        x,
        weight,
        bias,
        values,
        scales,
        residual,
        summed,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        per_token,
        0 if residual is None else residual.stride(0),
        width,
        values.shape[-1],
        eps,
        IS_RMS=rms,
        OFFSET=weight_offset,
        BLOCK=block,
        num_warps=warps_of_row(block),
        **early_options(),
    )


@triton.jit
def sums_of_pairs(x):
    """[R, n] fp32, n a power of two -> [R]: neighbours are added, then neighbouring sums, until one is left."""
    DEPTH: tl.constexpr = tl.constexpr(x.shape[1]).value.bit_length() - 1
    for _ in tl.static_range(DEPTH):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def inverse_rms(square_sum, width, eps):
    """1 / sqrt(square_sum / width + eps) of every row, each operation rounded once."""
    mean = tl.div_rn(square_sum, tl.zeros_like(square_sum) + width)
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def weighted(normed, weight, stored: tl.constexpr, OFFSET: tl.constexpr):
    """The result of an RMSNorm, in fp32. Llama rounds before it multiplies by the weight; Gemma multiplies by 1 +
    weight in fp32."""
    return normed * (weight + OFFSET) if OFFSET != 0.0 else normed.to(stored).to(tl.float32) * weight


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scales_ptr,
    residual_ptr,
    summed_ptr,
    token_stride,
    head_stride,
    per_token,
    residual_stride,
    width,
    out_width,
    eps,
    IS_RMS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    begin_early(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    stored = x_ptr.dtype.element_ty
    x_row = x_ptr + row // per_token * token_stride + row % per_token * head_stride
    x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + residual).to(stored)
        tl.store(summed_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if IS_RMS:
        total = sums_of_pairs(tl.reshape(x * x, [1, BLOCK]))
        y = weighted(x * inverse_rms(total, width, eps), weight, stored, OFFSET)
    else:
        mean = tl.div_rn(tl.sum(x, axis=0), width.to(tl.float32))
        centred = tl.where(inside, x - mean, 0.0)
        variance = tl.div_rn(tl.sum(centred * centred, axis=0), width.to(tl.float32))
        y = centred * tl.div_rn(1.0, tl.sqrt_rn(variance + eps)) * weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = y.to(stored)
    if scales_ptr is not None:
        y, scale = as_bytes(tl.where(inside, y.to(tl.float32), 0.0))
        tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * out_width + column, y, mask=column < out_width)
