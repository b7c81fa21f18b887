"""Writing new keys and values into the paged cache, with or without rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import LatentCache, QuantizedLatents
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference


def write_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """`Kernels.write_kv` to pages in the order of tokens."""
    block_size = key_cache.shape[2]
    is_kept = slots >= 0
    place = slots[is_kept] // block_size, slice(None), slots[is_kept] % block_size
    for new, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        rows = new[is_kept]
        if scales is not None:
            if cache.dtype == torch.float8_e4m3fn:
                quantized, row_scales = quantize_rows_fp8_reference(rows.flatten(0, 1), cache.dtype)
                rows, scales[place] = quantized.view(rows.shape), row_scales.view(rows.shape[:2])
            else:
                largest = rows.float().abs().amax(-1, keepdim=True)
                has_size = largest.isfinite() & (largest >= 1e-36)
                row_scales = (largest / 127).where(has_size, 0.0).where(largest.isfinite(), torch.nan)
                scales[place] = row_scales[..., 0]
                inverse = torch.full_like(largest, 127) / largest
                rows = torch.where(has_size, rows.float() * inverse, 0.0).round()
        if cache.itemsize == 1:  # torch cannot scatter fp8
            cache.view(torch.uint8)[place] = rows.to(cache.dtype).view(torch.uint8)
        else:
            cache[place] = rows.to(cache.dtype)


def write_latent(kernels: Kernels, latent: Tensor, rope_key: Tensor, cache: LatentCache, slots: Tensor) -> None:
    """Stores latent [T, R] and rope_key [T, P] at slots [T] (int64) of a cache [num_blocks, block_size, R + P], whose
    pages have the order of `kernels.page_order`. In `QuantizedLatents`, each token's latent is quantized as
    `Kernels.write_kv` quantizes a head; the values and the rotated parts are pages of their own, both in that order.

    Slots are as in `Kernels.write_kv`; token strides are free.
    """
    kernels.write_latent(latent, rope_key, cache, slots)


def write_latent_reference(latent: Tensor, rope_key: Tensor, cache: LatentCache, slots: Tensor) -> None:
    if isinstance(cache, QuantizedLatents):
        # A latent is stored like a key of one head, and its rotated part like a key without scales.
        heads, scales = cache.values[:, None], cache.scales[:, None]
        named = {"key_scales": scales, "value_scales": scales}
        write_kv_reference(latent[:, None], latent[:, None], heads, heads, slots, **named)
        write_kv_reference(*(rope_key[:, None],) * 2, *(cache.rope_keys[:, None],) * 2, slots)
        return
    is_kept = slots >= 0
    cache.view(-1, cache.shape[2])[slots[is_kept]] = torch.cat([latent[is_kept], rope_key[is_kept]], dim=-1)
