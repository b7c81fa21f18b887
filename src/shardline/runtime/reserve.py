"""Memory for weights, mapped and touched before anybody asks for it. No torch: it is to be there before torch is.

The first touch of a page costs more than all that a load does with it (0.1 ms a MB on a bare machine, 1 to 6 on a
virtual one, whose host has to find the memory too). While Python imports torch the other cores have nothing to do.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

from shardline import _cpu

HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of at least `num_bytes`, of its own, on huge pages where the system has them."""
    memory = mmap.mmap(-1, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without huge pages refuse the advice; nothing depends on it but speed.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Reserve:
    """A piece of memory that is handed out from its start, in the order in which its pages are touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._toucher: _cpu.PageToucher | None = None
        self._used = 0

    def fill(self, num_bytes: int, num_touched: int) -> None:
        """Map `num_bytes`, and touch the first `num_touched` of them in a thread until somebody takes of them."""
        self.release()
        with self._lock:
            self._memory, self._used = map_memory(max(num_bytes, 1)), 0
            self._toucher = _cpu.PageToucher(memoryview(self._memory)[:num_touched])

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
        """The memory and an offset in it where `num_bytes` are the caller's as long as it holds the memory; None if
        there are not so many left."""
        with self._lock:
            if self._memory is None or self._used + num_bytes > len(self._memory):
                return None
            # From now on the cores have better to do, and whoever writes a page takes it.
            if self._toucher is not None:
                self._toucher.stop()
                self._toucher = None
            offset = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._memory, offset

    def release(self) -> None:
        """Give back what nobody has taken."""
        with self._lock:
            self._toucher = None
            if self._memory is not None:
                rest = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
                if rest < len(self._memory):
                    self._memory.madvise(mmap.MADV_DONTNEED, rest)
            self._memory = None


weight_reserve = Reserve()
"""This process's."""
