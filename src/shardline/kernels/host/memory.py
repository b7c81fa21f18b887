"""Host memory for weights, which every step reads whole. It is mapped and touched before it is needed, and before torch
is imported, so this file imports torch late.

The first touch of a page costs more than everything else that loading does with it: 0.1 ms per MB on a physical
machine, and 1 to 6 ms per MB on a virtual machine, whose host must also find the memory. Other cores are idle while
Python imports torch.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardline import _cpu
from shardline.kernels.memory import map_memory, mapped_empty

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


class Reserve:
    """Memory that is given out from its start, in the order in which its pages are touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._toucher: _cpu.PageToucher | None = None
        self._used = 0

    def fill_memory(self, num_bytes: int, num_touched: int) -> None:
        """Map `num_bytes`. A thread touches the first `num_touched` bytes until the first `take_memory`."""
        self.release_rest()
        with self._lock:
            self._memory, self._used = map_memory(max(num_bytes, 1)), 0
            self._toucher = _cpu.PageToucher(memoryview(self._memory)[:num_touched])

    def take_memory(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
        """The memory, and the offset of `num_bytes` in it. These bytes belong to the caller as long as it holds the
        memory.

        None: fewer bytes are left.
        """
        with self._lock:
            if self._memory is None or self._used + num_bytes > len(self._memory):
                return None
            # From now on the cores are busy, and pages are touched when they are written.
            if self._toucher is not None:
                self._toucher.stop()
                self._toucher = None
            offset = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._memory, offset

    def release_rest(self) -> None:
        """Return the unused rest to the system."""
        with self._lock:
            self._toucher = None
            if self._memory is not None:
                rest = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
                if rest < len(self._memory):
                    self._memory.madvise(mmap.MADV_DONTNEED, rest)
            self._memory = None


class Region:
    """Memory for the weights of one layer, given out from its start in whole pages."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.used = 0

    def take_memory(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
        """As `Reserve.take_memory`."""
        offset = self.used
        if offset + num_bytes > len(self.memory):
            return None
        self.used += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self.memory, offset


class _Source(threading.local):
    region: Region | None = None


_source = _Source()


@contextlib.contextmanager
def taking_from(region: Region) -> Iterator[None]:
    """Weights that this thread allocates meanwhile lie in `region`, as far as it has room."""
    _source.region = region
    try:
        yield
    finally:
        _source.region = None


weight_reserve = Reserve()
"""The reserve of this process."""


def streamed_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor for weights, from the reserve if enough is left, and on huge pages if the system has
    them.

    Hardware prefetch stops at the end of a page. With pages of 4 KiB, a core reads a weight at two thirds of its speed
    with pages of 2 MiB.
    """
    count = math.prod(shape)
    taken = (_source.region or weight_reserve).take_memory(count * dtype.itemsize) if count else None
    if taken is None:
        return mapped_empty(shape, dtype)
    import torch

    memory, offset = taken
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))
