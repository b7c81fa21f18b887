"""Parts of files that are mapped into memory, and read into the page cache before."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from weakref import ref

import torch

CHUNK = 64 << 20
"""Bytes that are read at once."""
_SLICE = 16 << 20
"""Bytes of a large part that are copied at a time."""
_PANEL_ROWS = 64
"""Slices begin at multiples of this number of rows, which are packed together."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14."""
_scratch = memoryview(bytearray(1 << 18))
"""Where bytes go that are only read to be in the page cache. It is small, so that it stays in the processor's cache."""


class _Mapping(NamedTuple):
    """A large part of a file in memory."""

    memory: ref[mmap.mmap]
    address: int
    size: int


_large: list[_Mapping] = []
"""Mappings larger than `CHUNK` that may still be in use; they are few."""


def map_part(file: Path, offset: int, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8: a part of a file, in the file's own pages until it is written to.

    The part is mapped as long as the tensor lives. Its pages are read first, many at a time: faults would read them one
    by one, which is slower than storage. The pages of a part above `CHUNK` are read by `row_slices`.
    """
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), offset + num_bytes - begin, access=mmap.ACCESS_COPY, offset=begin)
        memory.madvise(mmap.MADV_SEQUENTIAL)
        if num_bytes <= CHUNK and not _populate(memory, 0, len(memory)):
            fetch(opened.fileno(), offset, num_bytes)
    if num_bytes > CHUNK:
        _large[:] = [one for one in _large if one.memory() is not None]
        _large.append(_Mapping(ref(memory), torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory)))
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset - begin)


def row_slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of a tensor that is copied once, in order.

    Rows of a large mapped part come some at a time. Their pages are read together, and then given back, since they
    count as this process's memory. Everything else comes whole.
    """
    mapping = _mapping_of(tensor)
    if mapping is None or tensor.dim() != 2 or tensor.stride(1) != 1:
        yield tensor
        return
    memory, address = mapping
    row_bytes = tensor.stride(0) * tensor.element_size()
    step = max(1, _SLICE // max(1, row_bytes) // _PANEL_ROWS) * _PANEL_ROWS
    for start in range(0, len(tensor), step):
        some = tensor[start : start + step]
        first = (some.data_ptr() - address) // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(len(memory), some.data_ptr() - address + len(some) * row_bytes)
        _populate(memory, first, last - first)
        yield some
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def copy_rows(tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to `out`, of the same shape; returns `out`."""
    if tensor.dim() != 2:
        return out.copy_(tensor)
    start = 0
    for rows in row_slices(tensor):
        out[start : start + len(rows)] = rows
        start += len(rows)
    return out


def fetch(descriptor: int, start: int, size: int) -> None:
    """Read `size` bytes, at most `CHUNK`, of a file into the page cache, unless they are there.

    If several processes ask for the same bytes at once, storage still reads them once.
    """
    if not _is_cached(descriptor, start, size):
        whole, rest = divmod(size, len(_scratch))
        os.preadv(descriptor, [*[_scratch] * whole, _scratch[:rest]], start)


def _mapping_of(tensor: torch.Tensor) -> tuple[mmap.mmap, int] | None:
    """The large mapping that a tensor is a part of, and the mapping's address."""
    for memory, address, size in _large:
        if address <= tensor.data_ptr() < address + size and (found := memory()) is not None:
            return found, address
    return None


def _populate(memory: mmap.mmap, start: int, size: int) -> bool:
    """Map the pages of a part. Those that are not in the page cache are read. False: the system cannot."""
    try:
        memory.madvise(_POPULATE_READ, start, size)
    except (OSError, ValueError):  # an old system, or a file that cannot be read
        return False
    return True


def _is_cached(descriptor: int, start: int, size: int) -> bool:
    """Whether the ends and the middle of a part are in the page cache."""
    byte = [bytearray(1)]
    try:
        return all(
            os.preadv(descriptor, byte, start + offset, os.RWF_NOWAIT) == 1 for offset in (0, size // 2, size - 1)
        )
    except OSError:  # it is not, or the file system cannot tell
        return False
