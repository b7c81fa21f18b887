"""Code shared by all matrix products on the GPU: tiles, and the sum over K.

Every output element is a chain of additions over K in order, never split, so it does not depend on the rows and columns
beside it. In floating point, the chain adds tensor-core products (16 elements of K in bf16, single elements in fp32) in
one fp32 accumulator. On Hopper all tiles use the same instruction, wgmma m64nNk16. Its 64 are rows of x, or in tiles of
few rows the weight's columns: such a tile is computed transposed, so that a program reads more of the weight at a time.
The bits are the same (seen on an H100). Sums of bytes are exact in int32, in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.activation import gated
from shardline.kernels.cuda.triton.launch import early_options, generation

_BLOCK_K = {1: 128, 2: 128, 4: 32}
"""Columns of K that a program loads at once, by bytes per element; it does not depend on M."""
_FEW_ROWS = 64
"""The most rows of a product whose tiles are computed transposed."""


class Tile(NamedTuple):
    """Rows and columns of the output that a program computes, and how it is pipelined."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def stages_of(tile: Tile, block_k: int, itemsize: int) -> int:
    """The stages of a tile's loop over K that fit the shared memory of a program. They change no bit."""
    held = 1024 * generation().shared_kib // ((tile.rows + tile.columns) * block_k * itemsize)
    fitting = held if generation().holds_all_stages else held + 1
    return max(1, min(tile.num_stages, fitting, generation().most_stages))


def computes_pairs(num_rows: int, dtype: torch.dtype, gate: str | None, *, is_scaled: bool) -> bool:
    """Whether a product is one of `_pair_of_products`: those with a gate and few rows."""
    return gate is not None and num_rows <= _FEW_ROWS and dtype != torch.float32 and not is_scaled


def tile_for(num_rows: int, num_columns: int, dtype: torch.dtype, *, in_pairs: bool = False) -> Tile:
    """The tile of a product. With few rows, time goes into reading the weight, so tiles are narrow, to let every
    multiprocessor read, and hold many stages of it. Many rows reuse the weight, so tiles are wide. `in_pairs`: the
    columns are those of `_pair_of_products`."""
    if dtype == torch.float32:
        return Tile(64, 64, 4, 2)
    more = 1 if dtype.itemsize == 1 else 0  # byte elements leave room for another stage
    if num_rows <= _FEW_ROWS:
        rows = next(rows for rows in (16, 32, 64) if num_rows <= rows)
        return Tile(rows, 32, 4, 5) if in_pairs else Tile(rows, 64, 4, 8)
    if num_rows <= 256:
        return Tile(64, 64, 4, 4 + more) if num_columns <= 8192 else Tile(128, 64, 8, 4 + more)
    return Tile(128, 128, 8, 3 + more)


def gemm_options(x: Tensor, weight: Tensor, tile: Tile, *, in_pairs: bool = False) -> dict[str, Any]:
    """Constants of a launch, for rows x [.., K] and a weight in a layout that `product` supports. `in_pairs`: as for
    `tile_for`."""
    block_k = _BLOCK_K[x.element_size()]
    loaded = tile._replace(columns=2 * tile.columns) if in_pairs else tile
    assert tile.rows > 64 or loaded.columns >= 64, "the columns of a transposed tile are the rows of an instruction"
    return {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": block_k,
        "IS_WHOLE_K": x.shape[-1] % (64 if weight.dtype == torch.uint8 else block_k) == 0,
        "num_warps": tile.num_warps,
        "num_stages": stages_of(loaded, block_k, x.element_size()),
        **early_options(),
    }


@triton.jit
def tile_of_program(program, row_tiles, column_tiles):
    """(row tile, column tile): programs that run together share up to 8 row tiles, so that weights stay in L2."""
    band = program // (8 * column_tiles)
    band_rows = min(row_tiles - 8 * band, 8)
    place = program - 8 * column_tiles * band
    return 8 * band + place % band_rows, place // band_rows


@triton.jit
def gated_product(
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    column_scales_ptr,
    bias_ptr,
    stored: tl.constexpr,
    row,
    row_inside,
    column,
    num_columns,
    depth,
    x_stride,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    """`product` plus bias, in fp32. If `GATE` names an activation, the weight has the gate's rows first, then as many
    rows of up. Both products are rounded to `stored` and then gated as in `activation`.
    """
    weight_columns = num_columns if GATE is None else 2 * num_columns
    is_narrow: tl.constexpr = BLOCK_M <= 64 and weight_ptr.dtype.element_ty != tl.float32
    if GATE is not None and is_narrow and row_scales_ptr is None:
        gate, total = _pair_of_products(
            x_ptr, weight_ptr, row, row_inside, column, column + num_columns, weight_columns, depth, x_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K,
        )  # fmt: skip
        gate = _with_bias(gate, bias_ptr, column, num_columns)
        total = _with_bias(total, bias_ptr, column + num_columns, weight_columns)
        total = _gated(gate, total, GATE, stored)
    else:
        total = product(
            x_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, row, row_inside, column, weight_columns, depth,
            x_stride, BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K,
        )  # fmt: skip
        total = _with_bias(total, bias_ptr, column, num_columns)
        if GATE is not None:  # one after the other, because tiles of many rows have no room for both
            gate = total
            column += num_columns
            total = product(
                x_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, row, row_inside, column, weight_columns, depth,
                x_stride, BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K,
            )  # fmt: skip
            total = _gated(gate, _with_bias(total, bias_ptr, column, weight_columns), GATE, stored)
    return total


@triton.jit
def _gated(gate, total, GATE: tl.constexpr, stored: tl.constexpr):
    """act(gate) * total in fp32; gate, total and the activation are rounded to `stored` before."""
    return gated(gate.to(stored).to(tl.float32), total.to(stored).to(tl.float32), GATE, stored)


@triton.jit
def _with_bias(total, bias_ptr, column, num_columns):
    """A product plus the bias of its columns, if there is one, in fp32."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def product(
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    column_scales_ptr,
    row,
    row_inside,
    column,
    num_columns,
    depth,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N]: rows `row` of x times columns `column` of a weight. The type of the weight's elements
    decides its layout.

    fp32, bf16 [N, K]; fp8, int8 [N, K] with scales [N] and scales of rows; uint8 is int4, in the layout of
    `cuda.weights.RowKernels.int4_empty`, with the same scales.
    """
    if weight_ptr.dtype.element_ty == tl.uint8:
        total = _int4_chain(
            x_ptr, weight_ptr, row, row_inside, column, num_columns, depth, x_stride,
            BLOCK_M, BLOCK_N, IS_WHOLE_K,
        )  # fmt: skip
    else:
        total = _chain(
            x_ptr, weight_ptr, row, row_inside, column, num_columns, depth, x_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K,
        )  # fmt: skip
    if row_scales_ptr is not None:
        scale = tl.load(row_scales_ptr + row, mask=row_inside, other=0.0)
        column_scale = tl.load(column_scales_ptr + column, mask=column < num_columns, other=0.0)
        total = total.to(tl.float32) * (scale[:, None] * column_scale[None, :])
    return total


@triton.jit
def _chain(
    x_ptr,
    weight_ptr,
    row,
    row_inside,
    column,
    num_columns,
    depth,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    """The sums over K: int32 of bytes, fp32 of anything else."""
    k = tl.arange(0, BLOCK_K)
    inside, column_inside = row_inside[:, None], column[None, :] < num_columns
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_tile = weight_ptr + column.to(tl.int64)[None, :] * depth + k[:, None]
    sums: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32
    is_narrow: tl.constexpr = BLOCK_M <= 64 and weight_ptr.dtype.element_ty != tl.float32
    total = tl.zeros((BLOCK_N, BLOCK_M) if is_narrow else (BLOCK_M, BLOCK_N), dtype=sums)
    for begin in range(0, depth, BLOCK_K):
        x = tl.load(x_tile + begin, mask=inside if IS_WHOLE_K else inside & (begin + k[None, :] < depth), other=0.0)
        weight_inside = column_inside if IS_WHOLE_K else column_inside & (begin + k[:, None] < depth)
        weight = tl.load(weight_tile + begin, mask=weight_inside, other=0.0)
        total = add_product(x, weight, total, BLOCK_K, is_narrow)
    return tl.trans(total) if is_narrow else total


@triton.jit
def _pair_of_products(
    x_ptr,
    weight_ptr,
    row,
    row_inside,
    first_column,
    second_column,
    num_columns,
    depth,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    """The `product`s of columns `first_column` and `second_column` of a weight in fp32 or bf16; x is read once."""
    total = _chain(
        x_ptr, weight_ptr, row, row_inside, tl.interleave(first_column, second_column), num_columns, depth, x_stride,
        BLOCK_M, 2 * BLOCK_N, BLOCK_K, IS_WHOLE_K,
    )  # fmt: skip
    first, second = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N, 2)))
    return first, second


@triton.jit
def add_product(x, weight, total, BLOCK_K: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """total + x @ weight, or all of them transposed."""
    left, right = (tl.trans(weight), tl.trans(x)) if IS_TRANSPOSED else (x, weight)
    if weight.dtype == tl.float8e4nv:
        # Hopper adds fp8 products with few bits, so sums of 128 elements are added in fp32.
        total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K)
    elif weight.dtype == tl.int8:
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _int4_chain(
    x_ptr,
    weight_ptr,
    row,
    row_inside,
    column,
    num_columns,
    depth,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    """The sums over K in int32 of x times (a value times its group's scale); the latter product is a byte."""
    k = tl.arange(0, 32)
    column_inside = column < num_columns
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_M <= 64 else (BLOCK_M, BLOCK_N), dtype=tl.int32)
    num_pairs = tl.cdiv(depth, 64)
    first, second = _scales_of_pair(weight_ptr, 0, column, num_columns)
    for pair in range(num_pairs):
        panel = weight_ptr + 34 * pair * num_columns
        both = tl.load(panel + 32 * column[None, :] + k[:, None], mask=column_inside[None, :], other=0x88)
        # They are loaded while the pair before is multiplied.
        next_scales = _scales_of_pair(weight_ptr, tl.minimum(pair + 1, num_pairs - 1), column, num_columns)
        x = tl.load(x_tile + 64 * pair, mask=row_inside[:, None], other=0)
        total = add_product(x, ((both & 15).to(tl.int8) - 8) * first[None, :], total, 32, BLOCK_M <= 64)
        inside = row_inside[:, None] if IS_WHOLE_K else row_inside[:, None] & (k[None, :] < depth - 64 * pair - 32)
        x = tl.load(x_tile + 64 * pair + 32, mask=inside, other=0)
        total = add_product(x, ((both >> 4).to(tl.int8) - 8) * second[None, :], total, 32, BLOCK_M <= 64)
        first, second = next_scales
    return tl.trans(total) if BLOCK_M <= 64 else total


@triton.jit
def _scales_of_pair(weight_ptr, pair, column, num_columns):
    """The scales of both groups of a pair [BLOCK_N], int8."""
    scales = (weight_ptr + (34 * pair + 32) * num_columns).to(tl.pointer_type(tl.int8)) + column
    inside = column < num_columns
    return tl.load(scales, mask=inside, other=0), tl.load(scales + num_columns, mask=inside, other=0)
