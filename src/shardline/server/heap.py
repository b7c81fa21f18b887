"""Gives memory back to the system that large requests have left behind in the allocator (glibc's)."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES = 256 << 10
_TRIM_BYTES = 512 << 10
LOOK_SECONDS = 10.0
"""Between two looks at how much memory this process has."""
_LONG_PAUSE = 30.0
"""The same after memory could not be given back."""
_GROWTH, _USELESS = 1.05, 0.99


def bound_heap() -> None:
    """Have large blocks go back to the system when they are freed; call it before there are threads.

    Otherwise glibc raises its thresholds with the first large body, and keeps tens of megabytes for each thread.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)  # few threads allocate at a time, and each arena keeps some of its own


async def keep_heap_small() -> None:
    """Give free pages back whenever the process has grown, until the task is cancelled."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    least, pause = _resident_bytes(), LOOK_SECONDS
    while True:
        await asyncio.sleep(pause)
        grown = _resident_bytes()
        least, pause = min(least, grown), LOOK_SECONDS
        if grown > _GROWTH * least:
            gc.collect()  # the errors of refused requests refer to themselves, and to what was refused
            # On a thread, since it takes milliseconds; ctypes lets others run meanwhile.
            await asyncio.to_thread(libc.malloc_trim, 0)
            if _resident_bytes() > _USELESS * grown:  # the memory is in use
                pause = _LONG_PAUSE


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
