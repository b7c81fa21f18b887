"""Row-wise scaled fp8 products on the GPU; see `ops.linear_fp8`. As batch-invariant as `linear`, by the same means."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.runtime.ops.triton.launch import EXACT, warps_of_row
from shardline.runtime.ops.triton.linear import Tile, tile_of_program

_BLOCK_K = 128


def quantize_rows_fp8(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Rows x [M, K] (may be strided) to values [M, K] float8_e4m3fn and scales [M] float32."""
    num_rows, width = x.shape
    if num_rows > 0:
        block = triton.next_power_of_2(width)
        _quantize_kernel[(num_rows,)](
            x, values, scales, x.stride(0), width, BLOCK=block, num_warps=warps_of_row(block), **EXACT
        )


def linear_fp8(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """values [M, K] times the transpose of weight [N, K], times scales [M] and weight_scales [N], plus bias, to out."""
    num_rows, depth = values.shape
    num_columns = weight.shape[0]
    if num_rows == 0:
        return
    tile = _tile_for(num_rows, num_columns)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns),)
    _linear_fp8_kernel[grid](
        values,
        scales,
        weight,
        weight_scales,
        bias,
        out,
        num_rows,
        num_columns,
        depth,
        out.stride(0),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=_BLOCK_K,
        IS_WHOLE_K=depth % _BLOCK_K == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )


def _tile_for(num_rows: int, num_columns: int) -> Tile:
    if num_rows <= 64:
        return Tile(64, 32 if num_columns <= 16384 else 64, 4, 5)
    if num_rows <= 256:
        return Tile(64, 64, 4, 5) if num_columns <= 8192 else Tile(128, 64, 8, 5)
    return Tile(128, 128, 8, 4)


@triton.jit
def _quantize_kernel(x_ptr, values_ptr, scales_ptr, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.max(tl.abs(x), axis=0)
    inverse = tl.where(magnitude > 0.0, tl.div_rn(448.0, tl.where(magnitude > 0.0, magnitude, 1.0)), 0.0)
    tl.store(values_ptr + row * width + column, (x * inverse).to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row, tl.div_rn(magnitude, 448.0))


@triton.jit(do_not_specialize=["num_rows"])
def _linear_fp8_kernel(
    values_ptr,
    scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    row_tile, column_tile = tile_of_program(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_inside, column_inside = row[:, None] < num_rows, column[None, :] < num_columns
    values_tile = values_ptr + row.to(tl.int64)[:, None] * depth + k[None, :]
    weight_tile = weight_ptr + column.to(tl.int64)[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, depth, BLOCK_K):
        if IS_WHOLE_K:
            values = tl.load(values_tile + begin, mask=row_inside, other=0.0)
            weight = tl.load(weight_tile + begin, mask=column_inside, other=0.0)
        else:
            left = depth - begin
            values = tl.load(values_tile + begin, mask=row_inside & (k[None, :] < left), other=0.0)
            weight = tl.load(weight_tile + begin, mask=column_inside & (k[:, None] < left), other=0.0)
        # Hopper's fp8 products are added with few bits: what they make of 128 elements is added in fp32.
        total = tl.dot(values, weight, total, max_num_imprecise_acc=BLOCK_K)
    scale = tl.load(scales_ptr + row, mask=row < num_rows, other=0.0)
    weight_scale = tl.load(weight_scales_ptr + column, mask=column < num_columns, other=0.0)
    total = total * (scale[:, None] * weight_scale[None, :])
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=row_inside & column_inside)
