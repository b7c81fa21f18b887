"""The memory in which a layer keeps keys and values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KVPages(NamedTuple):
    """Pages of one layer; layers whose blocks are not of the same group may share them."""

    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], and so are the values."""
    values: Tensor
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_kv_heads, block_size] where keys and values are int8 or fp8."""
    value_scales: Tensor | None = None
