"""The product with a 4-bit weight that is dequantized in registers, on the GPU: batch-invariant, see `gemm`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.gemm import Tile, add_product, stages_of, tile_for, tile_of_program
from shardline.kernels.cuda.triton.launch import EXACT, generation


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
    tile = tile or tile_for(num_rows, num_columns, x.dtype)._replace(num_stages=4)
    # Columns dequantized at once; other generations have no registers for more.
    block_k = 128 if generation().holds_all_stages else 64
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
        BLOCK_K=block_k,
        IS_WHOLE_K=depth % block_k == 0,
        num_warps=tile.num_warps,
        num_stages=stages_of(tile, block_k, x.element_size()),
        **EXACT,
    )


@triton.jit
def _of_groups(
    scales_ptr, zeros_ptr, begin, depth, column, num_columns, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(scales, zero points) of the weight's columns from `begin` on, [1 or BLOCK_K, BLOCK_N]; past the end, those of
    any group."""
    if GROUP_SIZE % BLOCK_K == 0:  # all of one group, or of the only one
        place = column[None, :]
        if GROUP_SIZE > 0:
            place += tl.minimum(begin, depth - 1) // GROUP_SIZE * num_columns
    else:
        k = tl.minimum(begin + tl.arange(0, BLOCK_K), depth - 1)
        place = k[:, None] // GROUP_SIZE * num_columns + column[None, :]
    inside = column[None, :] < num_columns
    return tl.load(scales_ptr + place, mask=inside, other=0.0), tl.load(zeros_ptr + place, mask=inside, other=0)


@triton.jit
def _codes(both, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bytes [BLOCK_K // 2, BLOCK_N] -> numbers of 4 bits in the order of the weight's columns, [BLOCK_K, BLOCK_N]: 32
    bytes hold two runs of 32, side by side."""
    halves = tl.reshape(tl.join(both & 15, both >> 4), (BLOCK_K // 64, 32, BLOCK_N, 2))
    return tl.reshape(tl.permute(halves, (0, 3, 1, 2)), (BLOCK_K, BLOCK_N))


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
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    row_tile, column_tile = tile_of_program(tl.program_id(0), row_tiles, column_tiles)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k, byte = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2)
    row_inside, column_inside = row[:, None] < num_rows, column[None, :] < num_columns
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    first_pair = values_ptr + (byte // 32).to(tl.int64)[:, None] * num_columns * 32 + (byte % 32)[:, None]
    value_tile = first_pair + column.to(tl.int64)[None, :] * 32
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_M <= 64 else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Scales are loaded while the columns before are multiplied.
    scale, zero = _of_groups(scales_ptr, zeros_ptr, 0, depth, column, num_columns, GROUP_SIZE, BLOCK_K)
    for begin in range(0, depth, BLOCK_K):
        next_scale, next_zero = _of_groups(
            scales_ptr, zeros_ptr, begin + BLOCK_K, depth, column, num_columns, GROUP_SIZE, BLOCK_K
        )
        # The last pair may have only one run. Then x is zero for the other run.
        inside = row_inside if IS_WHOLE_K else row_inside & (k[None, :] < depth - begin)
        value_inside = column_inside if IS_WHOLE_K else column_inside & (byte[:, None] // 32 * 64 < depth - begin)
        x = tl.load(x_tile + begin, mask=inside, other=0.0)
        codes = _codes(tl.load(value_tile, mask=value_inside, other=0), BLOCK_N, BLOCK_K)
        # The last bits of 2^23 + n are n. So one subtraction, which is exact, replaces a slow conversion.
        shifted = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        weight = ((shifted - (zero.to(tl.float32) + 8388608.0)) * scale.to(tl.float32)).to(dtype)
        total = add_product(x, weight, total, BLOCK_K, BLOCK_M <= 64)
        value_tile += num_columns * (BLOCK_K // 2)
        scale, zero = next_scale, next_zero
    if BLOCK_M <= 64:
        total = tl.trans(total)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=row_inside & column_inside)
