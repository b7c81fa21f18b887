"""Rotation of queries and keys, and the writing of keys, values and latents into pages in the order of tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardline.kernels.tensors import LatentCache
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference

_Value = TypeVar("_Value")
_MOST_KEPT = 48


class Kept:
    """What the layers of a step compute alike from its tables, by the identity of these, and as long as these live:
    masks of long prompts are large. Nobody may write to the tables afterwards."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[list[weakref.ref[Tensor]], Any]] = {}

    def value_of(self, tensors: tuple[Tensor, ...], more: Hashable, make: Callable[[], _Value]) -> _Value:
        """What `make` returns for these tensors, and for `more`."""
        key, values = (*map(id, tensors), more), self._values
        if key not in values:
            if len(values) >= _MOST_KEPT:
                values.clear()
            values[key] = [weakref.ref(tensor, lambda _: values.pop(key, None)) for tensor in tensors], make()
        value: _Value = values[key][1]
        return value


class CacheKernels:
    """See `contract.Kernels`."""

    def __init__(self) -> None:
        self._kept = Kept()

    def apply_rope(self, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> None:
        rot = table.shape[1]

        def factors() -> tuple[Tensor, Tensor]:
            cos, sin = table.index_select(0, positions.long())[:, None].chunk(2, dim=-1)
            if interleaved:
                return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
            return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

        cos, sin = self._kept.value_of((positions, table), interleaved, factors)
        rotated = x[..., :rot].float()
        if interleaved:
            other = rotated.view(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            other = rotated.roll(rot // 2, -1)
        x[..., :rot] = rotated * cos + other * sin

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
    ) -> None:
        kept, places = self._places(slots, key_cache.shape[1], key_cache.shape[2])
        for new, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
            _write_rows(new if kept is None else new.index_select(0, kept), cache, scales, places)

    def rope_and_write_kv(
        self,
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
        for heads in _together(query, key):
            self.apply_rope(heads, positions, table, interleaved)
        self.write_kv(key, value, key_cache, value_cache, slots, key_scales, value_scales)

    def write_latent(self, latent: Tensor, rope_key: Tensor, cache: LatentCache, slots: Tensor) -> None:
        pages = cache if isinstance(cache, Tensor) else cache.values
        kept, places = self._places(slots, 1, pages.shape[1])
        if kept is not None:
            latent, rope_key = latent.index_select(0, kept), rope_key.index_select(0, kept)
        if isinstance(cache, Tensor):
            _write_rows(torch.cat([latent, rope_key], -1), cache, None, places)
        else:
            _write_rows(latent, cache.values, cache.scales, places)
            _write_rows(rope_key, cache.rope_keys, None, places)

    def _places(self, slots: Tensor, num_heads: int, block_size: int) -> tuple[Tensor | None, Tensor]:
        """The tokens that are stored (None: all), and the rows of a cache [rows, D] for their heads, one after another
        within a token."""

        def places() -> tuple[Tensor | None, Tensor]:
            is_kept = slots >= 0
            kept = None if bool(is_kept.all()) else is_kept.nonzero()[:, 0]
            own = slots if kept is None else slots.index_select(0, kept)
            first = own // block_size * (num_heads * block_size) + own % block_size
            heads = torch.arange(num_heads, device=slots.device) * block_size
            return kept, (first[:, None] + heads).flatten()

        return self._kept.value_of((slots,), (num_heads, block_size), places)


def _together(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Both, or one tensor of all heads if the keys [T, Hk, D] lie behind the queries [T, Hq, D] in memory."""
    num_heads, dim = query.shape[1:]
    behind = query.storage_offset() + num_heads * dim
    same = query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    if not same or key.storage_offset() != behind or key.stride() != query.stride() or query.stride()[1:] != (dim, 1):
        return query, key
    return (query.as_strided((len(query), num_heads + key.shape[1], dim), query.stride()),)


def _write_rows(new: Tensor, cache: Tensor, scales: Tensor | None, places: Tensor) -> None:
    """Store the heads of new [T, .., D], quantized if there are scales, at rows of a cache [.., D]."""
    rows = new.reshape(-1, new.shape[-1])
    if scales is not None:
        rows, row_scales = _quantize_heads(rows, cache.dtype)
        scales.view(-1).index_copy_(0, places, row_scales)
    pages = cache.view(-1, cache.shape[-1])
    if cache.itemsize == 1:  # torch cannot scatter fp8
        pages.view(torch.uint8).index_copy_(0, places, rows.view(torch.uint8))
    else:
        pages.index_copy_(0, places, rows.to(cache.dtype))


def _quantize_heads(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [N, D] as values of `dtype` and scales [N]."""
    if dtype == torch.float8_e4m3fn:
        return quantize_rows_fp8_reference(rows, dtype)
    largest = rows.float().abs().amax(-1, keepdim=True)
    has_size = largest.isfinite() & (largest >= 1e-36)
    scales = (largest / 127).where(has_size, 0.0).where(largest.isfinite(), torch.nan)
    values = torch.where(has_size, rows.float() * (torch.full_like(largest, 127) / largest), 0.0)
    return values.round().to(torch.int8), scales[:, 0]
