"""Memory mapped for large tensors, which goes back to the system when they die."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardline.runtime.huge_pages import HUGE_PAGE, map_memory


def mapped_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor; where huge pages are worth it, its memory goes back to the system when it dies.

    The allocator may keep freed memory that lies between living tensors, so this suits large tensors that live for a
    moment while a model loads.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < HUGE_PAGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(map_memory(count * dtype.itemsize), dtype=dtype, count=count).view(tuple(shape))
