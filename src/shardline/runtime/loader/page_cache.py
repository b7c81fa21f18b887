"""Parts of files that are mapped into memory, and read into the page cache before."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

CHUNK = 64 << 20
"""Bytes that are read at once."""
_scratch = memoryview(bytearray(1 << 18))
"""Where bytes go that are only read to be in the page cache. It is small, so that it stays in the processor's cache."""


def map_part(file: Path, offset: int, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8: a part of a file, in the file's own pages until it is written to.

    The part is mapped as long as the tensor lives. Pages that are not in memory are read first, many at a time: faults
    would read them one by one, which is slower than storage.
    """
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        for start in range(offset, offset + num_bytes, CHUNK):
            fetch(opened.fileno(), start, min(CHUNK, offset + num_bytes - start))
        memory = mmap.mmap(opened.fileno(), offset + num_bytes - begin, access=mmap.ACCESS_COPY, offset=begin)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset - begin)


def fetch(descriptor: int, start: int, size: int) -> None:
    """Read `size` bytes, at most `CHUNK`, of a file into the page cache, unless they are there.

    If several processes ask for the same bytes at once, storage still reads them once.
    """
    if not _is_cached(descriptor, start, size):
        whole, rest = divmod(size, len(_scratch))
        os.preadv(descriptor, [*[_scratch] * whole, _scratch[:rest]], start)


def _is_cached(descriptor: int, start: int, size: int) -> bool:
    """Whether the ends and the middle of a part are in the page cache."""
    byte = [bytearray(1)]
    try:
        return all(
            os.preadv(descriptor, byte, start + offset, os.RWF_NOWAIT) == 1 for offset in (0, size // 2, size - 1)
        )
    except OSError:  # it is not, or the file system cannot tell
        return False
