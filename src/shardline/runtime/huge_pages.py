"""Memory of its own, mapped on huge pages."""

from __future__ import annotations

import contextlib
import mmap

HUGE_PAGE = 2 << 20


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of at least `num_bytes`, of its own, on huge pages where the system has them."""
    memory = mmap.mmap(-1, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without huge pages refuse the advice; nothing depends on it but speed.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
