"""The product for queries, keys and values on the GPU; it also rotates them and writes the KV cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.rows import UnnormedRows
from shardline.kernels.cuda.triton.gemm import (
    gemm_options,
    pair_of_products,
    tile_for,
    tile_of_program,
    with_bias,
)
from shardline.kernels.cuda.triton.linear import inverse_of, norm_arguments, norm_options
from shardline.kernels.cuda.triton.norm import inverse_rms, sums_of_pairs, weighted


def qkv_linear(
    x: Tensor | UnnormedRows,
    weight: Tensor,
    bias: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    interleaved: bool,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    """As `cuda.fused_ops.qkv_linear`, into query [M, Hq, D] and the caches.

    A tile computes two products: the first and the second columns of some pairs that are rotated together. If heads are
    normalised, a tile holds the pairs of one head.
    """
    norm = x if isinstance(x, UnnormedRows) else None
    rows = x.rows if isinstance(x, UnnormedRows) else x
    (num_rows, depth), head_dim, rotary_dim = rows.shape, query.shape[2], table.shape[1]
    num_pairs = weight.shape[0] // 2
    if num_rows == 0:
        return
    tile = tile_for(num_rows, num_pairs, rows.dtype, in_pairs=True)
    if query_norm is not None:
        tile = tile._replace(columns=head_dim // 2)
    _qkv_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_pairs, tile.columns),)](
        rows,
        weight,
        bias,
        query,
        key_cache,
        value_cache,
        slots,
        positions,
        table,
        query_norm,
        key_norm,
        eps,
        num_rows,
        num_pairs,
        depth,
        rows.stride(0),
        query.shape[1],
        key_cache.shape[1],
        key_cache.shape[2],
        *norm_arguments(norm),
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        IS_INTERLEAVED=interleaved,
        HEAD_OFFSET=weight_offset,
        **norm_options(norm),
        **gemm_options(rows, weight, tile, in_pairs=True),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _qkv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    query_norm_ptr,
    key_norm_ptr,
    head_eps,
    num_rows,
    num_pairs,
    depth,
    x_stride,
    num_heads,
    num_kv_heads,
    block_size,
    square_sums_ptr,
    norm_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEAD_OFFSET: tl.constexpr,
    RUNS: tl.constexpr,
    MORE_RUNS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
):
    PAIRS: tl.constexpr = HEAD_DIM // 2
    stored: tl.constexpr = query_ptr.dtype.element_ty
    row_tile, column_tile = tile_of_program(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_pairs, BLOCK_N))
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    place = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    head, pair = place // PAIRS, place % PAIRS
    # Columns that are not rotated are paired in the same way.
    if IS_INTERLEAVED:
        at_first, at_second = 2 * pair, 2 * pair + 1
    else:
        at_first = tl.where(pair < HALF, pair, HALF + pair)
        at_second = at_first + tl.where(pair < HALF, HALF, PAIRS - HALF)
    num_columns = 2 * num_pairs
    inverse = None
    if square_sums_ptr is not None:
        inverse = inverse_of(square_sums_ptr, row, row < num_rows, depth, eps, RUNS, MORE_RUNS)
    first_column, second_column = head * HEAD_DIM + at_first, head * HEAD_DIM + at_second
    first, second = pair_of_products(
        x_ptr, weight_ptr, row, row < num_rows, first_column, second_column, num_columns, depth, x_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K, inverse, norm_ptr, OFFSET,
    )  # fmt: skip
    first = with_bias(first, bias_ptr, first_column, num_columns).to(stored).to(tl.float32)
    second = with_bias(second, bias_ptr, second_column, num_columns).to(stored).to(tl.float32)

    is_value = head >= num_heads + num_kv_heads
    if query_norm_ptr is not None:
        head_inverse = inverse_rms(_square_sums(first, second, IS_INTERLEAVED), HEAD_DIM, head_eps)[:, None]
        head_norm_ptr = query_norm_ptr if column_tile < num_heads else key_norm_ptr
        of_first = tl.load(head_norm_ptr + at_first).to(tl.float32)[None, :]
        of_second = tl.load(head_norm_ptr + at_second).to(tl.float32)[None, :]
        normed = weighted(first * head_inverse, of_first, stored, HEAD_OFFSET).to(stored).to(tl.float32)
        first = tl.where(is_value[None, :], first, normed)
        normed = weighted(second * head_inverse, of_second, stored, HEAD_OFFSET).to(stored).to(tl.float32)
        second = tl.where(is_value[None, :], second, normed)

    row_inside = (row < num_rows)[:, None]
    rotates = row_inside & ((pair < HALF) & (head < num_heads + num_kv_heads))[None, :]
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
    angle = table_ptr + position[:, None] * (2 * HALF) + pair[None, :]
    cosine, sine = tl.load(angle, mask=rotates, other=0.0), tl.load(angle + HALF, mask=rotates, other=0.0)
    rotated_first = tl.where(rotates, tl.fma(first, cosine, -(second * sine)), first).to(stored)
    rotated_second = tl.where(rotates, tl.fma(second, cosine, first * sine), second).to(stored)

    is_query = row_inside & (head < num_heads)[None, :]
    query = query_ptr + (row.to(tl.int64)[:, None] * num_heads + head[None, :]) * HEAD_DIM
    tl.store(query + at_first[None, :], rotated_first, mask=is_query)
    tl.store(query + at_second[None, :], rotated_second, mask=is_query)

    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)[:, None]
    kv_head = ((head - num_heads) % num_kv_heads)[None, :]
    cache_row = ((slot // block_size * num_kv_heads + kv_head) * block_size + slot % block_size) * HEAD_DIM
    is_key = (slot >= 0) & ((head >= num_heads) & (head < num_heads + num_kv_heads))[None, :]
    tl.store(key_cache_ptr + cache_row + at_first[None, :], rotated_first, mask=is_key)
    tl.store(key_cache_ptr + cache_row + at_second[None, :], rotated_second, mask=is_key)
    is_kept = (slot >= 0) & (is_value & (place < num_pairs))[None, :]
    tl.store(value_cache_ptr + cache_row + at_first[None, :], rotated_first, mask=is_kept)
    tl.store(value_cache_ptr + cache_row + at_second[None, :], rotated_second, mask=is_kept)


@triton.jit
def _square_sums(first, second, IS_INTERLEAVED: tl.constexpr):
    """The sum of squares of the head with these pairs, all of them rotated, in the order of `norm.sums_of_pairs`."""
    if IS_INTERLEAVED:
        total = sums_of_pairs(first * first + second * second)
    else:
        total = sums_of_pairs(first * first) + sums_of_pairs(second * second)
    return total
