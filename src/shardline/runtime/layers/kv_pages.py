"""The memory in which a layer keeps keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVPages:
    """Pages of one layer; layers whose blocks are not of the same group may share them."""

    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], and so are the values."""
    values: Tensor
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_kv_heads, block_size] where keys and values are int8."""
    value_scales: Tensor | None = None

    @classmethod
    def allocate(cls, shape: tuple[int, int, int, int], dtype: torch.dtype) -> KVPages:
        """Pages of the shape of `keys`. Untouched pages of an empty tensor take no memory."""
        pages = cls(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
        if dtype != torch.int8:
            return pages
        return cls(pages.keys, pages.values, torch.empty(shape[:3]), torch.empty(shape[:3]))

    @property
    def num_bytes(self) -> int:
        """Of keys, values and scales."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)
