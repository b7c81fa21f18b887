"""The memory for a layer's keys and values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KVPages(NamedTuple):
    """The pages of one layer; layers of different KV groups may share them."""

    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], in the order of `Kernels.page_order`; the values have the same
    shape."""
    values: Tensor
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_kv_heads, block_size] if keys and values are int8 or fp8 (e4m3), else None."""
    value_scales: Tensor | None = None
