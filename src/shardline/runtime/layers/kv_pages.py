"""The memory in which a layer keeps keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class CachePart(NamedTuple):
    """A tensor that a layer caches in."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class KVPages(NamedTuple):
    """Pages of one layer; layers whose blocks are not of the same group may share them."""

    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], and so are the values."""
    values: Tensor
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_kv_heads, block_size] where keys and values are int8 or fp8."""
    value_scales: Tensor | None = None
