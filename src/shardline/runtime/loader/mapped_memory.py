"""Mapped memory for large tensors, which returns to the system when they are freed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardline.runtime.huge_pages import HUGE_PAGE, map_memory


def mapped_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor. If it is large enough for huge pages, its memory returns to the system when it is freed.

    The allocator may keep freed memory between live tensors, so use this for large tensors that are needed only briefly
    while a model loads.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < HUGE_PAGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(map_memory(count * dtype.itemsize), dtype=dtype, count=count).view(tuple(shape))
