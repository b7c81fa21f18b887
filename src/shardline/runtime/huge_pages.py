"""Anonymous memory, mapped on huge pages."""

from __future__ import annotations

import contextlib
import mmap

HUGE_PAGE = 2 << 20


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory of at least `num_bytes`, on huge pages where the system has them."""
    memory = mmap.mmap(-1, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Systems without huge pages refuse the advice. Only speed depends on it.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
