"""Matrix products with one weight, on the GPU: batch-invariant, see `gemm`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.activations import empty_rows
from shardline.kernels.cuda.library import library_computes, library_product
from shardline.kernels.cuda.triton.activation import activation
from shardline.kernels.cuda.triton.gemm import (
    Tile,
    computes_pairs,
    gated_product,
    gemm_options,
    tile_for,
    tile_of_program,
)
from shardline.kernels.cuda.triton.launch import begin_early


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None) -> None:
    """x [M, K] times the transpose of weight [N, K], plus bias [N], into out [M, N].

    Rows of x and out may be strided; the weight is contiguous. If `gate` names an activation, the weight and the bias
    have 2 * N rows, and out is as in `PackedGatedLinear`.
    """
    if gate is not None and library_computes(len(x), weight, bias):
        both = empty_rows(x.device, out.dtype, len(x), len(weight))
        if library_product(x, weight, bias, both):
            activation(both, out, gate, True)
            return
    elif gate is None and library_product(x, weight, bias, out):
        return
    launch_linear(x, weight, bias, out, gate=gate)


def linear_fp8(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gate: str | None = None,
) -> None:
    """values [M, K] times the transpose of weight [N, K], times scales [M] and weight_scales [N], plus bias, to out."""
    launch_linear(values, weight, bias, out, scales, weight_scales, gate=gate)


def linear_int8(
    values: Tensor,
    scales: Tensor,
    _sums: Tensor,
    _depth: int,
    panels: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gate: str | None = None,
) -> None:
    """The product of the int8 format, with the CPU's bits; see `weights.scaled.ScaledWeight.multiply`."""
    launch_linear(values, panels, bias, out, scales, column_scales, gate=gate)


def linear_int4(
    values: Tensor,
    scales: Tensor,
    _sums: Tensor,
    _depth: int,
    panels: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    gate: str | None = None,
) -> None:
    """The product of the int4 format, with the CPU's bits; see `weights.scaled.ScaledWeight.multiply`."""
    launch_linear(values, panels, bias, out, scales, column_scales, gate=gate)


def linear_heads(x: Tensor, panels: Tensor, out: Tensor) -> None:
    """As `ops.attention.linear_heads.linear_heads`: x [T, H, K] times the transposes of panels [H, N, K], into out [T,
    H, N]."""
    launch_linear(x, panels, None, out)


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
    *,
    tile: Tile | None = None,
    gate: str | None = None,
) -> None:
    """x [M, K] times a weight in any layout of `gemm.product`, plus bias, into out [M, N]. With heads, x is [M, H, K],
    out is [M, H, N], and each head has its own weight. `gate`: see `linear`."""
    num_rows, depth, num_columns = x.shape[0], x.shape[-1], out.shape[-1]
    if num_rows == 0:
        return
    has_heads = x.dim() == 3
    rows = num_rows if tile is None else tile.rows
    in_pairs = computes_pairs(rows, x.dtype, gate, is_scaled=row_scales is not None)
    tile = tile or tile_for(num_rows, num_columns, x.dtype, in_pairs=in_pairs)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    _linear_kernel[(tiles, x.shape[1] if has_heads else 1)](
        x,
        row_scales,
        weight,
        column_scales,
        bias,
        out,
        num_rows,
        num_columns,
        depth,
        x.stride(0),
        out.stride(0),
        x.stride(1) if has_heads else 0,
        weight.stride(0) if has_heads else 0,
        out.stride(1) if has_heads else 0,
        GATE=gate,
        **gemm_options(x, weight, tile, in_pairs=in_pairs),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    column_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    x_stride,
    out_stride,
    x_head_stride,
    weight_head_stride,
    out_head_stride,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    begin_early(IS_EARLY)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    row_tile, column_tile = tile_of_program(tl.program_id(0), row_tiles, column_tiles)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * x_head_stride
    weight_ptr += matrix * weight_head_stride
    out_ptr += matrix * out_head_stride
    total = gated_product(
        x_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, bias_ptr, out_ptr.dtype.element_ty, row, row < num_rows,
        column, num_columns, depth, x_stride, GATE, BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K,
    )  # fmt: skip
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)
