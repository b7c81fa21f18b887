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
def _group_of(scales_ptr, zeros_ptr, begin, depth, column, num_columns, GROUP_SIZE: tl.constexpr):
    """(scale, zero point) [BLOCK_N] of the group of the weight's columns from `begin` on; past the end, any group's."""
    place = column
    if GROUP_SIZE > 0:
        place = tl.minimum(begin, depth - 1) // GROUP_SIZE * num_columns + column
    inside = column < num_columns
    return tl.load(scales_ptr + place, mask=inside, other=0.0), tl.load(zeros_ptr + place, mask=inside, other=0)


@triton.jit
def _dequantized(q, scale, zero, dtype: tl.constexpr):
    """32 columns of a weight, all of one group: q [32, BLOCK_N] -> [32, BLOCK_N] of `dtype`."""
    return ((q.to(tl.float32) - zero.to(tl.float32)[None, :]) * scale.to(tl.float32)[None, :]).to(dtype)


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
    total = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_M <= 64 else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    # The groups of a pair are loaded while the pair before is multiplied.
    IS_ONE_GROUP: tl.constexpr = GROUP_SIZE % 64 == 0
    scale, zero = _group_of(scales_ptr, zeros_ptr, 0, depth, column, num_columns, GROUP_SIZE)
    second_scale, second_zero = scale, zero
    if not IS_ONE_GROUP:
        second_scale, second_zero = _group_of(scales_ptr, zeros_ptr, 32, depth, column, num_columns, GROUP_SIZE)
    for begin in range(0, depth, 64):
        both = tl.load(value_tile, mask=column_inside, other=0)
        value_tile += num_columns * 32
        next_scale, next_zero = _group_of(scales_ptr, zeros_ptr, begin + 64, depth, column, num_columns, GROUP_SIZE)
        inside = row_inside if IS_WHOLE_K else row_inside & (k[None, :] < depth - begin)
        x = tl.load(x_tile + begin, mask=inside, other=0.0)
        total = add_product(x, _dequantized(both & 15, scale, zero, dtype), total, 32, BLOCK_M <= 64)
        # The last pair may have only one run. Then x is zero for the other run.
        inside = row_inside if IS_WHOLE_K else row_inside & (k[None, :] < depth - begin - 32)
        x = tl.load(x_tile + begin + 32, mask=inside, other=0.0)
        if IS_ONE_GROUP:
            total = add_product(x, _dequantized(both >> 4, scale, zero, dtype), total, 32, BLOCK_M <= 64)
        else:
            weight = _dequantized(both >> 4, second_scale, second_zero, dtype)
            total = add_product(x, weight, total, 32, BLOCK_M <= 64)
            second_scale, second_zero = _group_of(
                scales_ptr, zeros_ptr, begin + 96, depth, column, num_columns, GROUP_SIZE
            )
        scale, zero = next_scale, next_zero
    if BLOCK_M <= 64:
        total = tl.trans(total)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=row_inside & column_inside)
