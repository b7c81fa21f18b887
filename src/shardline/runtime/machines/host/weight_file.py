"""A file for weights that do not stay in memory. Every chunk has a checksum, which is kept in memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardline import _cpu
from shardline.config.fields import format_bytes
from shardline.kernels.memory import mapped_empty

_log = logging.getLogger(__name__)

_CHUNK = 8 << 20
"""Bytes of one read. Direct reads need multiples of a disk's block."""
BLOCK = 4096
"""Places in the file and in memory are multiples of this."""


class _Chunk(NamedTuple):
    offset: int
    """In the file."""
    stored: int
    """Bytes in the file; fewer than `length`: exponents are shortened, see csrc/cpu/runtime/short_exponents.h."""
    checksum: int
    """Of the bytes in the file."""
    start: int
    """In memory."""
    length: int
    """Bytes in memory."""


class Extent(NamedTuple):
    """A part of the file, and where it belongs in memory."""

    memory: mmap.mmap
    chunks: list[_Chunk]
    length: int
    """Bytes in memory."""


class WeightFile:
    """The file has no name, so it is gone when the rank ends. It is read past the page cache where the file system can
    do so: the pages would push out others, and be gone before they are wanted again.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """`most_bytes`: of the weights that will be written; the file may have fewer.

        Raises:
            ValueError: no file can be made in the folder.
        """
        self.folder = folder
        self._most_bytes = most_bytes
        self.num_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer, self._reader = _open_file(folder)
        except OSError as error:
            raise ValueError(f"offload_to: no file can be made in {folder}: {error.strerror}") from None
        self._shortened: Tensor | None = None
        """Memory for a chunk that is written; not the heap's, where a piece of this size would leave holes."""
        self._own = threading.local()
        """Of each thread that reads."""
        for descriptor in (self._writer, self._reader):
            weakref.finalize(self, os.close, descriptor)

    def append(self, memory: mmap.mmap, start: int, length: int, *, shorten: bool = False) -> Extent:
        """Write `length` bytes of `memory`, a multiple of BLOCK; `flush` before they are read.

        `shorten`: bf16 may take three quarters of its bytes. While it is read, its memory has other bytes.

        Raises:
            ValueError: they cannot be written.
        """
        extent = Extent(memory, [], length)
        with self._writing():
            os.posix_fallocate(self._writer, self.num_bytes, length)
            for begin in range(start, start + length, _CHUNK):
                extent.chunks.append(self._append_chunk(memory, begin, min(_CHUNK, start + length - begin), shorten))
        return extent

    def _append_chunk(self, memory: mmap.mmap, start: int, length: int, shorten: bool) -> _Chunk:
        written, offset = _bytes_of(memory, start, length), self.num_bytes
        if shorten:
            if self._shortened is None:
                self._shortened = mapped_empty((_CHUNK,), torch.uint8)
            if count := _cpu.shorten_exponents(written, self._shortened):
                written = self._shortened[:count]
        stored, done = len(written), 0
        while done < stored:
            done += os.pwrite(self._writer, written.numpy().data[done:], offset + done)
        self.num_bytes += stored
        return _Chunk(offset, stored, _cpu.checksum(written), start, length)

    def flush(self) -> None:
        """Have all that was written on the disk, and no longer in the page cache.

        Raises:
            ValueError: it cannot be written.
        """
        with self._writing():
            os.fsync(self._writer)
            os.posix_fadvise(self._writer, 0, self.num_bytes, os.POSIX_FADV_DONTNEED)
        self._shortened = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"offload_to: this rank's {format_bytes(self._most_bytes)} of weights cannot be written to "
                f"{self.folder}, only {format_bytes(self.num_bytes)}: {error.strerror}"
            ) from None

    def read(self, extent: Extent, what: str) -> None:
        """Read every chunk to its place in memory, which has small pages, perhaps ones that are not there yet. A disk
        fills huge pages more than twice as fast, so each thread has some that chunks pass through.

        Raises:
            OSError: `what` cannot be read, or is not what was written.
        """
        if not hasattr(self._own, "passage"):
            self._own.passage = mapped_empty((_CHUNK,), torch.uint8)
        for chunk in extent.chunks:
            passage = self._own.passage[: chunk.length]
            self._read_chunk(chunk, passage, what)
            np.copyto(_bytes_of(extent.memory, chunk.start, chunk.length).numpy(), passage.numpy())

    def read_chunk(self, extent: Extent, number: int, what: str) -> None:
        """Read a chunk to its place in memory.

        Raises:
            OSError: as `read`.
        """
        chunk = extent.chunks[number]
        self._read_chunk(chunk, _bytes_of(extent.memory, chunk.start, chunk.length), what)

    def _read_chunk(self, chunk: _Chunk, memory: Tensor, what: str) -> None:
        stored = memory[chunk.length - chunk.stored :]
        for attempt in range(2):
            self._read_bytes(stored, chunk.offset, what)
            if _cpu.checksum(stored) == chunk.checksum:
                break
            words = "once more" if attempt == 0 else "in vain"
            _log.warning("weights in %s are not what was written; read %s", self.folder, words)
        else:
            raise OSError(f"{what} in {self.folder} are not what was written")
        if chunk.stored < chunk.length:
            _cpu.restore_exponents(memory, chunk.stored)

    def _read_bytes(self, place: Tensor, offset: int, what: str) -> None:
        view, done = place.numpy().data, 0
        while done < len(view):
            count = os.preadv(self._reader, [view[done:]], offset + done)
            if not count:
                raise OSError(f"{what} in {self.folder} end early")
            done += count


def _bytes_of(memory: mmap.mmap, start: int, count: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)


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
