"""The product with a 4-bit weight that is dequantized in registers, on the GPU: batch-invariant, see `gemm`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.gemm import Tile, add_product, tile_for, tile_of_program
from shardline.kernels.cuda.triton.launch import EXACT


def linear_w4a16(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    bias: Tensor | None,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """The product of `W4A16Linear`: x [M, K] into out [M, N], whose rows may be strided; the other arguments are as in
    W4A16Weight."""
    num_rows, depth = x.shape
    num_columns = out.shape[1]
    if num_rows == 0:
        return
    tile = tile or tile_for(num_rows, num_columns, x.dtype)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    _linear_w4a16_kernel[(tiles,)](
        x,
        values,
        scales,
        zeros,
        bias,
        out,
        num_rows,
        num_columns,
        depth,
        x.stride(0),
        out.stride(0),
        GROUP_SIZE=group_size if scales.shape[0] > 1 else 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        IS_WHOLE_K=depth % 64 == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )


@triton.jit
def _dequantized(q, scales_ptr, zeros_ptr, begin, column, num_columns, GROUP_SIZE: tl.constexpr, dtype: tl.constexpr):
    """32 columns of a weight from `begin` on, all of one group: q [32, BLOCK_N] -> [32, BLOCK_N] of `dtype`."""
    place = column
    if GROUP_SIZE > 0:
        place = begin // GROUP_SIZE * num_columns + column
    scale = tl.load(scales_ptr + place, mask=column < num_columns, other=0.0).to(tl.float32)
    zero = tl.load(zeros_ptr + place, mask=column < num_columns, other=0).to(tl.float32)
    return ((q.to(tl.float32) - zero[None, :]) * scale[None, :]).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_w4a16_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    x_stride,
    out_stride,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    row_tile, column_tile = tile_of_program(tl.program_id(0), row_tiles, column_tiles)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 32)
    row_inside, column_inside = row[:, None] < num_rows, column[None, :] < num_columns
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    value_tile = values_ptr + column.to(tl.int64)[None, :] * 32 + k[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_M < 64 else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for pair in range(tl.cdiv(depth, 64)):
        both = tl.load(value_tile, mask=column_inside, other=0)
        value_tile += num_columns * 32
        begin = 64 * pair
        inside = row_inside if IS_WHOLE_K else row_inside & (k[None, :] < depth - begin)
        x = tl.load(x_tile + begin, mask=inside, other=0.0)
        weight = _dequantized(both & 15, scales_ptr, zeros_ptr, begin, column, num_columns, GROUP_SIZE, dtype)
        total = add_product(x, weight, total, 32, BLOCK_M < 64)
        # The last pair may have only one run. Then x is zero for the other run, and any group may be used.
        begin += 32
        inside = row_inside if IS_WHOLE_K else row_inside & (k[None, :] < depth - begin)
        x = tl.load(x_tile + begin, mask=inside, other=0.0)
        group_at = begin if IS_WHOLE_K else tl.minimum(begin, depth - 1)
        weight = _dequantized(both >> 4, scales_ptr, zeros_ptr, group_at, column, num_columns, GROUP_SIZE, dtype)
        total = add_product(x, weight, total, 32, BLOCK_M < 64)
    if BLOCK_M < 64:
        total = tl.trans(total)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=row_inside & column_inside)
