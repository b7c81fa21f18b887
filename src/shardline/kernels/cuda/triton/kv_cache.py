"""Writing new keys and values into the paged cache, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT
from shardline.kernels.cuda.triton.quantize import as_bytes, as_fp8


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """As `ops.attention.kv_cache.write_kv`."""
    num_tokens, num_kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if num_tokens > 0:
        _write_kv_kernel[(num_tokens, num_kv_heads)](
            key,
            value,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
            slots,
            key.stride(0),
            value.stride(0),
            num_kv_heads,
            key_cache.shape[2],
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY=triton.next_power_of_2(key_dim),
            VALUE=triton.next_power_of_2(value_dim),
            num_warps=1,
            **EXACT,
        )


def write_latent(latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As `ops.attention.kv_cache.write_latent`."""
    num_tokens, rank = latent.shape
    rope_dim = rope_key.shape[1]
    if num_tokens > 0:
        _write_latent_kernel[(num_tokens,)](
            latent,
            rope_key,
            cache,
            slots,
            latent.stride(0),
            rope_key.stride(0),
            RANK=rank,
            ROPE_DIM=rope_dim,
            LATENT=triton.next_power_of_2(rank),
            ROPE=triton.next_power_of_2(rope_dim),
            num_warps=2,
        )


def write_quantized_latent(
    latent: Tensor, rope_key: Tensor, values: Tensor, rope_keys: Tensor, scales: Tensor, slots: Tensor
) -> None:
    """As `ops.attention.kv_cache.write_latent`, into the parts of QuantizedLatents."""
    num_tokens, rank = latent.shape
    rope_dim = rope_key.shape[1]
    if num_tokens > 0:
        _write_quantized_latent_kernel[(num_tokens,)](
            latent,
            rope_key,
            values,
            rope_keys,
            scales,
            slots,
            latent.stride(0),
            rope_key.stride(0),
            RANK=rank,
            ROPE_DIM=rope_dim,
            LATENT=triton.next_power_of_2(rank),
            ROPE=triton.next_power_of_2(rope_dim),
            num_warps=2,
            **EXACT,
        )


@triton.jit
def _store_head(head_ptr, cache_ptr, scales_ptr, row, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a head of a token in its row of a cache, unchanged, or as int8 or fp8 with a scale."""
    column = tl.arange(0, COLUMNS)
    values = tl.load(head_ptr + column, mask=column < DIM, other=0.0)
    if scales_ptr is not None:
        values = values.to(tl.float32)
        values, scale = as_bytes(values) if cache_ptr.dtype.element_ty == tl.int8 else as_fp8(values)
        tl.store(scales_ptr + row, scale)
    tl.store(cache_ptr + row * DIM + column, values, mask=column < DIM)


@triton.jit
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    key_stride,
    value_stride,
    num_kv_heads,
    block_size,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    row = (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
    _store_head(key_ptr + token * key_stride + head * KEY_DIM, key_cache_ptr, key_scales_ptr, row, KEY_DIM, KEY)
    value = value_ptr + token * value_stride + head * VALUE_DIM
    _store_head(value, value_cache_ptr, value_scales_ptr, row, VALUE_DIM, VALUE)


@triton.jit
def _write_latent_kernel(
    latent_ptr,
    rope_key_ptr,
    cache_ptr,
    slots_ptr,
    latent_stride,
    rope_stride,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    row = cache_ptr + slot * (RANK + ROPE_DIM)
    column = tl.arange(0, LATENT)
    latent = tl.load(latent_ptr + token * latent_stride + column, mask=column < RANK)
    tl.store(row + column, latent, mask=column < RANK)
    column = tl.arange(0, ROPE)
    rope_key = tl.load(rope_key_ptr + token * rope_stride + column, mask=column < ROPE_DIM)
    tl.store(row + RANK + column, rope_key, mask=column < ROPE_DIM)


@triton.jit
def _write_quantized_latent_kernel(
    latent_ptr,
    rope_key_ptr,
    values_ptr,
    rope_keys_ptr,
    scales_ptr,
    slots_ptr,
    latent_stride,
    rope_stride,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    _store_head(latent_ptr + token * latent_stride, values_ptr, scales_ptr, slot, RANK, LATENT)
    column = tl.arange(0, ROPE)
    rope_key = tl.load(rope_key_ptr + token * rope_stride + column, mask=column < ROPE_DIM, other=0.0)
    place = rope_keys_ptr + slot * ROPE_DIM + column
    tl.store(place, rope_key.to(rope_keys_ptr.dtype.element_ty), mask=column < ROPE_DIM)
