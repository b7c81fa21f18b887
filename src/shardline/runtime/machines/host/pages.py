"""Pages of anonymous memory that move from one place in the address space to another."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from pathlib import Path
from typing import Any

_MAY_MOVE, _FIXED, _KEEP_SOURCE_MAPPED = 1, 2, 4
_MAP_FIXED = 0x10
_MS_ASYNC = 1
_FAILED = ctypes.c_void_p(-1).value
_USUAL_MAPPINGS = 65530
_SHARE_OF_MAPPINGS = 0.75
"""Of those that a process may have: the rest is for all else."""


def can_move(num_mappings: int) -> bool:
    """Whether `move_pages` may be called, if the process has so many mappings more then."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        most = _USUAL_MAPPINGS
    return _libc() is not None and num_mappings <= _SHARE_OF_MAPPINGS * most


def move_pages(source: int, target: int, length: int) -> bool:
    """Have the pages at the address `source` at `target`, where there are none; then there are none at `source`. Moving
    one takes a hundredth of the time that giving it back and touching a new one takes.

    False: the system cannot do this (Linux can from 5.7 on). The pages are where they were.

    Raises:
        OSError: the memory at `target` cannot be mapped any more.
    """
    libc = _libc()
    flags = _MAY_MOVE | _FIXED | _KEEP_SOURCE_MAPPED
    if libc.mremap(source, length, length, flags, target) == target:
        return True
    if libc.msync(target, length, _MS_ASYNC) == 0:
        return False
    # The call has unmapped the target before it failed.
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if libc.mmap(target, length, access, kind, -1, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return False


@functools.cache
def _libc() -> Any:
    """None: there is no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mremap"):
        return None
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mremap.restype = libc.mmap.restype = address
    libc.mremap.argtypes = [address, size, size, number, address]
    libc.msync.argtypes = [address, size, number]
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    return libc
