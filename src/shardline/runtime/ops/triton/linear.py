"""Matrix product with a row-major weight [N, K], on the GPU: batch-invariant.

Every output element is a chain of tensor-core products of 16 elements of K (fp32: of single elements), in the order of
K, in one fp32 accumulator. Tiles differ in M and N only, and their M is never below 64: on Hopper all of them are then
the same instruction, wgmma m64nNk16, and a row's bits follow from the row and the weight alone. K is never split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardline.runtime.ops.triton.launch import EXACT

BLOCK_K = {2: 128, 4: 32}
"""Columns of K that a program loads at once, by bytes of an element; the same whatever M."""


class Tile(NamedTuple):
    """Rows and columns of the output that a program computes, and how it is pipelined."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def tile_for(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tile:
    """Few rows stream the weight: narrow tiles, so that every multiprocessor reads. Many rows reuse it: wide ones."""
    if dtype == torch.float32:
        return Tile(64, 64, 4, 2)
    if num_rows <= 64:
        return Tile(64, 32 if num_columns <= 16384 else 64, 4, 4)
    if num_rows <= 256:
        return Tile(64, 64, 4, 4) if num_columns <= 8192 else Tile(128, 64, 8, 4)
    return Tile(128, 128, 8, 3)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """As `ops.linear.linear`: x [M, K] times the transpose of weight [N, K], plus bias [N], into out [M, N].

    Rows of x and out may be strided; the weight is contiguous.
    """
    launch_linear(x, weight, bias, out, tile_for(x.shape[0], weight.shape[0], x.dtype))


def launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
    """`linear` with a tile of choice."""
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    if num_rows == 0:
        return
    block_k = BLOCK_K[x.element_size()]
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns),)
    _linear_kernel[grid](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_columns,
        depth,
        x.stride(0),
        out.stride(0),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=block_k,
        IS_WHOLE_K=depth % block_k == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )


@triton.jit
def tile_of_program(program, num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(row tile, column tile): programs that run together share up to 8 row tiles, so that weights stay in L2."""
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    band = program // (8 * column_tiles)
    band_rows = min(row_tiles - 8 * band, 8)
    place = program - 8 * column_tiles * band
    return 8 * band + place % band_rows, place // band_rows


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    x_stride,
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
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_tile = weight_ptr + column.to(tl.int64)[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, depth, BLOCK_K):
        if IS_WHOLE_K:
            x = tl.load(x_tile + begin, mask=row_inside, other=0.0)
            weight = tl.load(weight_tile + begin, mask=column_inside, other=0.0)
        else:
            left = depth - begin
            x = tl.load(x_tile + begin, mask=row_inside & (k[None, :] < left), other=0.0)
            weight = tl.load(weight_tile + begin, mask=column_inside & (k[:, None] < left), other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=row_inside & column_inside)
