"""Quantizes rows of activations to bytes with one scale per row, on the GPU: int8 with the CPU's bits, and fp8."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT, warps_of_row


def quantize_rows_fp8(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantize rows x [M, K] (may be strided) to values [M, K] float8_e4m3fn and scales [M] float32."""
    _launch(x, values, scales)


def quantize_rows(x: Tensor, values: Tensor, scales: Tensor, sums: Tensor | None) -> None:
    """As `weights.rows.quantize_rows`, without the sums: the GPU's products read signed weights and need no sums."""
    _launch(x, values, scales)


def _launch(x: Tensor, values: Tensor, scales: Tensor) -> None:
    num_rows, width = x.shape
    if num_rows > 0:
        block = triton.next_power_of_2(values.shape[1])
        _quantize_kernel[(num_rows,)](
            x, values, scales, x.stride(0), width, values.shape[1], BLOCK=block, num_warps=warps_of_row(block), **EXACT
        )


@triton.jit
def as_bytes(x):
    """(x / scale rounded to int8, scale) of a row in fp32; the largest |x| becomes 127. A row that is not finite has
    the scale NaN."""
    magnitude = tl.max(tl.abs(x), axis=0)
    scale = tl.div_rn(magnitude, 127.0)
    is_finite = (scale < float("inf")) & (tl.max((x != x).to(tl.int32), axis=0) == 0)
    has_size = is_finite & (magnitude >= 1e-36)
    inverse = tl.div_rn(127.0, tl.where(has_size, magnitude, 1.0))
    # The last bit of the added constant has the value one, so the sum is rounded to a whole number, ties to even.
    scaled = tl.where(has_size, x * inverse, 0.0)
    rounded = (scaled + 12582912.0) - 12582912.0
    scale = tl.where(is_finite, tl.where(has_size, scale, 0.0), float("nan"))
    return rounded.to(tl.int8), scale


@triton.jit
def as_fp8(x):
    """(x / scale rounded to float8_e4m3fn, scale); the largest |x| becomes 448. Otherwise as in `as_bytes`."""
    magnitude = tl.max(tl.abs(x), axis=0)
    is_finite = (magnitude < float("inf")) & (tl.max((x != x).to(tl.int32), axis=0) == 0)
    has_size = is_finite & (magnitude >= 1e-36)
    inverse = tl.div_rn(448.0, tl.where(has_size, magnitude, 1.0))
    values = tl.where(has_size, x * inverse, 0.0).to(tl.float8e4nv)
    scale = tl.where(has_size, tl.div_rn(magnitude, 448.0), 0.0)
    return values, tl.where(is_finite, scale, float("nan"))


@triton.jit
def _quantize_kernel(x_ptr, values_ptr, scales_ptr, x_stride, width, padded_width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    if values_ptr.dtype.element_ty == tl.int8:
        values, scale = as_bytes(x)
    else:
        values, scale = as_fp8(x)
    tl.store(values_ptr + row * padded_width + column, values, mask=column < padded_width)
    tl.store(scales_ptr + row, scale)
