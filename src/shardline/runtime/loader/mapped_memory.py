"""Memory mapped for large tensors, which goes back to the system when they die."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HUGE_PAGE = 2 << 20


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of at least `num_bytes`, of its own, on huge pages where the system has them."""
    memory = mmap.mmap(-1, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without huge pages refuse the advice; nothing depends on it but speed.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def mapped_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor; where huge pages are worth it, its memory goes back to the system when it dies.

    The allocator may keep freed memory that lies between living tensors, so this suits large tensors that live for a
    moment while a model loads.
    """
    import torch

    count = math.prod(shape)
    if count * dtype.itemsize < HUGE_PAGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(map_memory(count * dtype.itemsize), dtype=dtype, count=count).view(tuple(shape))
