"""Rotary position embedding on the GPU, alone or together with the KV cache write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.kv_cache import write_kv
from shardline.kernels.cuda.triton.launch import EXACT, begin_early, early_options


def apply_rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> None:
    """Rotates x [T, H, D] in place, as `ops.attention.rope.apply_rope`; the token stride is free."""
    num_tokens, num_heads, _ = x.shape
    if num_tokens > 0:
        rot = table.shape[1]
        _rope_kernel[(num_tokens,)](
            x,
            positions,
            table,
            x.stride(0),
            num_heads,
            x.stride(1),
            HALF=rot // 2,
            IS_INTERLEAVED=interleaved,
            HEADS=triton.next_power_of_2(num_heads),
            PAIRS=triton.next_power_of_2(rot // 2),
            **EXACT,
        )


def rope_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    interleaved: bool,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Rotate query [T, Hq, D] and key [T, Hk, D] in place (`apply_rope`), then `write_kv`. This is one launch, unless
    the caches hold quantized elements."""
    if key_scales is not None:
        apply_rope(query, positions, table, interleaved)
        apply_rope(key, positions, table, interleaved)
        write_kv(key, value, key_cache, value_cache, slots, key_scales, value_scales)
        return
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    if num_tokens == 0:
        return
    rot = table.shape[1]
    _rope_and_write_kernel[(num_tokens,)](
        query,
        key,
        value,
        key_cache,
        value_cache,
        positions,
        slots,
        table,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        num_heads,
        num_kv_heads,
        key_cache.shape[2],
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        HALF=rot // 2,
        IS_INTERLEAVED=interleaved,
        HEADS=triton.next_power_of_2(num_heads),
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        PAIRS=triton.next_power_of_2(rot // 2),
        REST=triton.next_power_of_2(head_dim - rot) if head_dim > rot else 0,
        VALUE=triton.next_power_of_2(value_dim),
        **early_options(),
    )


@triton.jit
def _rotated(x_ptr, table_row, num_heads, HEAD_STRIDE, HALF, IS_INTERLEAVED, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """The pairs of all heads at x_ptr, rotated, with their offsets: first, second, at_first, at_second, inside."""
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (head < num_heads) & (pair < HALF)
    at_first = head * HEAD_STRIDE + (2 * pair if IS_INTERLEAVED else pair)
    at_second = at_first + (1 if IS_INTERLEAVED else HALF)
    cosine = tl.load(table_row + pair, mask=pair < HALF, other=0.0)
    sine = tl.load(table_row + HALF + pair, mask=pair < HALF, other=0.0)
    first = tl.load(x_ptr + at_first, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at_second, mask=inside, other=0.0).to(tl.float32)
    cosine, sine = tl.broadcast_to(cosine, (HEADS, PAIRS)), tl.broadcast_to(sine, (HEADS, PAIRS))
    rotated_first = tl.fma(first, cosine, -(second * sine))
    rotated_second = tl.fma(second, cosine, first * sine)
    return rotated_first, rotated_second, at_first, at_second, inside


@triton.jit
def _rope_kernel(
    x_ptr,
    positions_ptr,
    table_ptr,
    token_stride,
    num_heads,
    head_stride,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    table_row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    x = x_ptr + token * token_stride
    first, second, at_first, at_second, inside = _rotated(
        x, table_row, num_heads, head_stride, HALF, IS_INTERLEAVED, HEADS, PAIRS
    )
    stored = x_ptr.dtype.element_ty
    tl.store(x + at_first, first.to(stored), mask=inside)
    tl.store(x + at_second, second.to(stored), mask=inside)


@triton.jit
def _rope_and_write_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    query_stride,
    key_stride,
    value_stride,
    num_heads,
    num_kv_heads,
    block_size,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    begin_early(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    stored = query_ptr.dtype.element_ty
    table_row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    query = query_ptr + token * query_stride
    first, second, at_first, at_second, inside = _rotated(
        query, table_row, num_heads, HEAD_DIM, HALF, IS_INTERLEAVED, HEADS, PAIRS
    )
    tl.store(query + at_first, first.to(stored), mask=inside)
    tl.store(query + at_second, second.to(stored), mask=inside)

    key = key_ptr + token * key_stride
    first, second, at_first, at_second, inside = _rotated(
        key, table_row, num_kv_heads, HEAD_DIM, HALF, IS_INTERLEAVED, KV_HEADS, PAIRS
    )
    tl.store(key + at_first, first.to(stored), mask=inside)
    tl.store(key + at_second, second.to(stored), mask=inside)

    slot = tl.load(slots_ptr + token)
    head = tl.arange(0, KV_HEADS)[:, None]
    # Row of (block, head, offset) in a cache [num_blocks, num_kv_heads, block_size, dim].
    row = (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
    has_slot = (slot >= 0) & (head < num_kv_heads)
    in_head = at_first - head * HEAD_DIM
    tl.store(key_cache_ptr + row * HEAD_DIM + in_head, first.to(stored), mask=inside & has_slot)
    in_head = at_second - head * HEAD_DIM
    tl.store(key_cache_ptr + row * HEAD_DIM + in_head, second.to(stored), mask=inside & has_slot)
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        kept = has_slot & (column < HEAD_DIM)
        rest = tl.load(key + head * HEAD_DIM + column, mask=kept)
        tl.store(key_cache_ptr + row * HEAD_DIM + column, rest, mask=kept)
    column = tl.arange(0, VALUE)[None, :]
    kept = has_slot & (column < VALUE_DIM)
    value = tl.load(value_ptr + token * value_stride + head * VALUE_DIM + column, mask=kept)
    tl.store(value_cache_ptr + row * VALUE_DIM + column, value, mask=kept)
