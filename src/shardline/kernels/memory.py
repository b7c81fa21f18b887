"""Anonymous memory on huge pages, for large tensors. torch is imported late: memory may be reserved before."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_HUGE_PAGE = 2 << 20


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory of at least `num_bytes`, on huge pages where the system has them."""
    memory = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Systems without huge pages refuse the advice. Only speed depends on it.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def mapped_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor. If it is large enough for huge pages, its memory returns to the system when it is freed.

    The allocator may keep freed memory between live tensors, so use this for large tensors that are needed only briefly
    while a model loads.
    """
    import torch

    count = math.prod(shape)
    if count * dtype.itemsize < _HUGE_PAGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(map_memory(count * dtype.itemsize), dtype=dtype, count=count).view(tuple(shape))
