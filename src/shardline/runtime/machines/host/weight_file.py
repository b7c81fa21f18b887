"""A file for weights that do not stay in memory. Every chunk has a checksum, which is kept in memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from shardline import _cpu
from shardline.config.fields import format_bytes

_log = logging.getLogger(__name__)

_CHUNK = 8 << 20
"""Bytes of one read. Direct reads need multiples of a disk's block."""
BLOCK = 4096
"""Places in the file and in memory are multiples of this."""


class Extent(NamedTuple):
    """A part of the file, and where it belongs in memory."""

    offset: int
    length: int
    memory: mmap.mmap
    start: int
    sums: list[int]
    """The checksum of each chunk."""


class WeightFile:
    """The file has no name, so it is gone when the rank ends. It is read past the page cache where the file system can
    do so: the pages would push out others, and be gone before they are wanted again.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ValueError: no file can be made in the folder.
        """
        self.folder = folder
        self.num_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer, self._reader = _open_file(folder)
        except OSError as error:
            raise ValueError(f"offload_to: no file can be made in {folder}: {error.strerror}") from None
        for descriptor in (self._writer, self._reader):
            weakref.finalize(self, os.close, descriptor)

    def append(self, memory: mmap.mmap, start: int, length: int) -> Extent:
        """Write `length` bytes of `memory`, a multiple of BLOCK; `flush` before they are read.

        Raises:
            ValueError: they cannot be written.
        """
        offset, done = self.num_bytes, 0
        with memoryview(memory)[start : start + length] as view, self._writing(offset + length):
            os.posix_fallocate(self._writer, offset, length)
            while done < length:
                done += os.pwrite(self._writer, view[done : done + _CHUNK], offset + done)
        self.num_bytes += length
        sums = [_checksum(memory, start + at, min(_CHUNK, length - at)) for at in range(0, length, _CHUNK)]
        return Extent(offset, length, memory, start, sums)

    def flush(self) -> None:
        """Have all that was written on the disk, and no longer in the page cache.

        Raises:
            ValueError: it cannot be written.
        """
        with self._writing(self.num_bytes):
            os.fsync(self._writer)
            os.posix_fadvise(self._writer, 0, self.num_bytes, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def _writing(self, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"offload_to: {format_bytes(num_bytes)} of weights cannot be written to {self.folder}: {error.strerror}"
            ) from None

    def read(self, extent: Extent, what: str, first: int = 0, step: int = 1) -> None:
        """Read every chunk whose number is `first` plus a multiple of `step` to its place in memory.

        Raises:
            OSError: `what` cannot be read, or is not what was written.
        """
        for number in range(first, len(extent.sums), step):
            begin = number * _CHUNK
            size = min(_CHUNK, extent.length - begin)
            for attempt in range(2):
                self._read_chunk(extent, begin, size, what)
                if _checksum(extent.memory, extent.start + begin, size) == extent.sums[number]:
                    break
                words = "once more" if attempt == 0 else "in vain"
                _log.warning("weights in %s are not what was written; read %s", self.folder, words)
            else:
                raise OSError(f"{what} in {self.folder} are not what was written")

    def _read_chunk(self, extent: Extent, begin: int, size: int, what: str) -> None:
        place, done = extent.start + begin, 0
        with memoryview(extent.memory)[place : place + size] as view:
            while done < size:
                count = os.preadv(self._reader, [view[done:]], extent.offset + begin + done)
                if not count:
                    raise OSError(f"{what} in {self.folder} end early")
                done += count


def _checksum(memory: mmap.mmap, start: int, count: int) -> int:
    return _cpu.checksum(torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start))


def _open_file(folder: Path) -> tuple[int, int]:
    """A file without a name, to write, and to read past the page cache if that works."""
    descriptor, name = tempfile.mkstemp(prefix="shardline-weights-", dir=folder)
    try:
        try:
            reader = os.open(name, os.O_RDONLY | os.O_DIRECT)
            os.pwrite(descriptor, bytes(BLOCK), 0)
            with mmap.mmap(-1, BLOCK) as block:
                os.preadv(reader, [block], 0)
        except OSError:  # such as on a tmpfs
            reader = os.open(name, os.O_RDONLY)
    finally:
        os.unlink(name)
    return descriptor, reader
