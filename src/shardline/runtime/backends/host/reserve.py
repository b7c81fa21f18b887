"""Memory for weights that is mapped and touched before it is needed. No torch: it should be there before torch is.

The first touch of a page costs more than everything else that loading does with it: 0.1 ms a MB on a bare machine, 1 to
6 ms on a virtual one, whose host has to find the memory too. Other cores are idle while Python imports torch.
"""

from __future__ import annotations

import mmap
import threading

from shardline import _cpu
from shardline.runtime.huge_pages import map_memory

_ALIGNMENT = 64


class Reserve:
    """Memory that is handed out from its start, in the order in which its pages are touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._toucher: _cpu.PageToucher | None = None
        self._used = 0

    def fill_memory(self, num_bytes: int, num_touched: int) -> None:
        """Map `num_bytes`; a thread touches the first `num_touched` of them until somebody takes some."""
        self.release_rest()
        with self._lock:
            self._memory, self._used = map_memory(max(num_bytes, 1)), 0
            self._toucher = _cpu.PageToucher(memoryview(self._memory)[:num_touched])

    def take_memory(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
        """The memory, and the offset of `num_bytes` in it that are the caller's while it holds the memory.

        None: fewer are left.
        """
        with self._lock:
            if self._memory is None or self._used + num_bytes > len(self._memory):
                return None
            # From now on the cores are busy, and whoever writes a page touches it.
            if self._toucher is not None:
                self._toucher.stop()
                self._toucher = None
            offset = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._memory, offset

    def release_rest(self) -> None:
        """Give back what nobody took."""
        with self._lock:
            self._toucher = None
            if self._memory is not None:
                rest = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
                if rest < len(self._memory):
                    self._memory.madvise(mmap.MADV_DONTNEED, rest)
            self._memory = None


weight_reserve = Reserve()
"""This process's."""
