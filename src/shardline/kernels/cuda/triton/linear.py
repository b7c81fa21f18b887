"""Matrix products with one weight, on the GPU: batch-invariant, see `gemm`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.activations import empty_rows
from shardline.kernels.cuda.library import library_computes, library_product
from shardline.kernels.cuda.rows import UnnormedRows
from shardline.kernels.cuda.triton.activation import activation
from shardline.kernels.cuda.triton.gemm import (
    Tile,
    computes_pairs,
    gated_product,
    gemm_options,
    tile_for,
    tile_of_program,
)
from shardline.kernels.cuda.triton.norm import inverse_rms, sums_of_pairs


def linear(x: Tensor | UnnormedRows, weight: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None) -> None:
    """x [M, K] times the transpose of weight [N, K], plus bias [N], into out [M, N].

    Rows of x and out may be strided; the weight is contiguous. If `gate` names an activation, the weight and the bias
    have 2 * N rows, and out is as in `PackedGatedLinear`.
    """
    if isinstance(x, UnnormedRows):
        launch_linear(x.rows, weight, bias, out, gate=gate, norm=x)
        return
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


def runs_of_row(num_rows: int, num_columns: int, dtype: torch.dtype) -> int:
    """How many sums of squares `add_linear` writes for a row of `num_columns`."""
    columns = tile_for(num_rows, num_columns, dtype).columns
    return -(-num_columns // columns)


def add_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, out: Tensor, square_sums: Tensor
) -> None:
    """As `cuda.fused_ops.add_linear`, into out [M, N] and square_sums [M, runs]; a run has as many columns as a
    tile."""
    launch_linear(x, weight, bias, out, residual=residual, square_sums=square_sums)


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
    norm: UnnormedRows | None = None,
    residual: Tensor | None = None,
    square_sums: Tensor | None = None,
) -> None:
    """x [M, K] times a weight in any layout of `gemm.product`, plus bias, into out [M, N]. With heads, x is [M, H, K],
    out is [M, H, N], and each head has its own weight. `gate`: see `linear`; `norm`: the norm of x; `residual` and
    `square_sums`: see `add_linear`."""
    num_rows, depth, num_columns = x.shape[0], x.shape[-1], out.shape[-1]
    if num_rows == 0:
        return
    has_heads = x.dim() == 3
    rows = num_rows if tile is None else tile.rows
    in_pairs = computes_pairs(rows, x.dtype, gate, is_normed=norm is not None, is_scaled=row_scales is not None)
    tile = tile or tile_for(num_rows, num_columns, x.dtype, in_pairs=in_pairs)
    assert square_sums is None or square_sums.shape[1] == triton.cdiv(num_columns, tile.columns)
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
        *norm_arguments(norm),
        residual,
        square_sums,
        0 if residual is None else residual.stride(0),
        GATE=gate,
        **norm_options(norm),
        **gemm_options(x, weight, tile, in_pairs=in_pairs),
    )


def norm_arguments(norm: UnnormedRows | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A kernel's arguments for a norm, read by `inverse_of` and `gemm.product`: sums of squares, weight, eps."""
    return (None, None, 0.0) if norm is None else (norm.square_sums, norm.weight, norm.eps)


def norm_options(norm: UnnormedRows | None) -> dict[str, Any]:
    """A kernel's constants for a norm."""
    runs = 1 if norm is None else norm.square_sums.shape[1]
    return {"RUNS": runs, "MORE_RUNS": triton.next_power_of_2(runs), "OFFSET": norm.weight_offset if norm else 0.0}


@triton.jit
def inverse_of(square_sums_ptr, row, row_inside, depth, eps, RUNS: tl.constexpr, MORE_RUNS: tl.constexpr):
    """1 / rms of each row in fp32, from the sums of squares of its runs."""
    run = tl.arange(0, MORE_RUNS)[None, :]
    place = square_sums_ptr + row[:, None] * RUNS + run
    sums = tl.load(place, mask=row_inside[:, None] & (run < RUNS), other=0.0)
    return inverse_rms(sums_of_pairs(sums), depth, eps)


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
    square_sums_ptr,
    norm_ptr,
    eps,
    residual_ptr,
    new_square_sums_ptr,
    residual_stride,
    GATE: tl.constexpr,
    RUNS: tl.constexpr,
    MORE_RUNS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    row_tile, column_tile = tile_of_program(tl.program_id(0), row_tiles, column_tiles)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * x_head_stride
    weight_ptr += matrix * weight_head_stride
    out_ptr += matrix * out_head_stride
    inverse = None
    if square_sums_ptr is not None:
        inverse = inverse_of(square_sums_ptr, row, row < num_rows, depth, eps, RUNS, MORE_RUNS)
    total = gated_product(
        x_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, bias_ptr, out_ptr.dtype.element_ty, row, row < num_rows,
        column, num_columns, depth, x_stride, GATE, BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K, inverse, norm_ptr, OFFSET,
    )  # fmt: skip
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    stored = out_ptr.dtype.element_ty
    if residual_ptr is not None:
        residual_place = residual_ptr + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        total = total.to(stored).to(tl.float32) + tl.load(residual_place, mask=inside, other=0.0).to(tl.float32)
        rounded = tl.where(inside, total.to(stored).to(tl.float32), 0.0)
        sums = sums_of_pairs(rounded * rounded)
        tl.store(new_square_sums_ptr + row * column_tiles + column_tile, sums, mask=row < num_rows)
    tl.store(place, total.to(stored), mask=inside)
