"""Writing new keys and values into the paged cache, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """As `ops.kv_cache.write_kv`."""
    assert key_scales is None and value_scales is None, "resolve refuses int8 caches on GPUs"  # noqa: PT018
    num_tokens, num_kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if num_tokens > 0:
        _write_kv_kernel[(num_tokens, num_kv_heads)](
            key,
            value,
            key_cache,
            value_cache,
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
        )


@triton.jit
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
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
    column = tl.arange(0, KEY)
    key = tl.load(key_ptr + token * key_stride + head * KEY_DIM + column, mask=column < KEY_DIM)
    tl.store(key_cache_ptr + row * KEY_DIM + column, key, mask=column < KEY_DIM)
    column = tl.arange(0, VALUE)
    value = tl.load(value_ptr + token * value_stride + head * VALUE_DIM + column, mask=column < VALUE_DIM)
    tl.store(value_cache_ptr + row * VALUE_DIM + column, value, mask=column < VALUE_DIM)
