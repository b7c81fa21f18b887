"""A rank's parts of blocks in files, one each.

A file is written under another name and renamed, and its header says how long it is, whose it is, and what checksum its
content has. So what a crash, a full disk or another process leaves is either whole or is not taken for a block. Several
processes may use one folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from shardline.deployment.block_folder import ANY_BLOCK, KEY_BYTES, block_path, key_of
from shardline.kernels.block_copies import checksum

_MAGIC = b"ShardKV1"
_HEADER = struct.Struct(f"<8s16s{KEY_BYTES}s6xQQ")
"""Magic, layout, key, bytes of content, checksum."""
_TEMPORARY = ".part"
_OLD_SECONDS = 600.0
"""Age of an unfinished file from which its writer has surely ended."""
_KEPT = 0.9
"""The share of the budget to which old files are removed."""


class CorruptFile(Exception):
    """A file is not what was written."""


class BlockFiles:
    """The files of a rank in `folder`, which is below `root`; together, all files below `root` are held to a budget."""

    def __init__(self, root: Path, folder: Path, layout: bytes, budget: int, num_writers: int) -> None:
        """`layout`: 16 bytes that name the form of the content; `budget`: bytes; `num_writers`: ranks that share it."""
        self._root = root
        self._folder = folder
        self._layout = layout
        self._budget = budget
        self._step = budget // (16 * num_writers)
        """Bytes that may be written before old files are looked for."""
        self._untrimmed = self._step
        self._numbers = itertools.count()
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"

    def write(self, key: bytes, content: Tensor, total: int, is_current: Callable[[], bool]) -> int:
        """Keep uint8 [num_bytes] with its checksum `total`, unless that changes before all is written, which
        `is_current` tells. Returns the bytes written: 0 if there is a file already.

        Raises:
            OSError: it cannot be written. Nothing is left of it.
        """
        if not is_current():
            return 0
        path = block_path(self._folder, key)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # what is longest unused is removed first
            return 0
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        header = self._header(key, content, total)
        temporary = path.with_name(f"{self._name}-{next(self._numbers)}{_TEMPORARY}")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                left = [memoryview(header), content.numpy().data]
                while left:
                    count = os.writev(file, left)
                    while left and count >= len(left[0]):
                        count -= len(left.pop(0))
                    if left:
                        left[0] = left[0][count:]
            finally:
                os.close(file)
            if not is_current():
                temporary.unlink()
                return 0
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._untrimmed += len(header) + len(content)
        if self._untrimmed >= self._step:
            self._untrimmed = 0
            self.trim()
        return len(header) + len(content)

    def read(self, key: bytes, content: Tensor) -> int:
        """Fill uint8 [num_bytes]; returns its checksum.

        Raises:
            FileNotFoundError: there is none.
            CorruptFile: it is not what was written; the file is gone now.
            OSError: it cannot be read.
        """
        path = block_path(self._folder, key)
        header = bytearray(_HEADER.size)
        with path.open("rb", buffering=0) as file:
            count = os.preadv(file.fileno(), [header, content.numpy().data], 0)
            while 0 < count - len(header) < len(content):
                more = os.preadv(file.fileno(), [content.numpy().data[count - len(header) :]], count)
                if not more:
                    break
                count += more
            is_whole = count == len(header) + len(content) == os.fstat(file.fileno()).st_size
        if is_whole and header == self._header(key, content, total := checksum(content)):
            with contextlib.suppress(OSError):
                os.utime(path)
            return total
        with contextlib.suppress(OSError):
            path.unlink()
        raise CorruptFile(f"{path} is not what was written")

    def _header(self, key: bytes, content: Tensor, total: int) -> bytes:
        return _HEADER.pack(_MAGIC, self._layout, key, len(content), total)

    def trim(self) -> None:
        """Remove the blocks that are longest unused, if there are more bytes than the budget has. Other files stay."""
        files, total, now = [], 0, time.time()
        for path in self._root.glob(ANY_BLOCK):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix == _TEMPORARY:
                    if status.st_mtime < now - _OLD_SECONDS:
                        path.unlink()
                elif key_of(path.parent.name, path.name) is not None:
                    files.append((status.st_mtime, status.st_size, path))
                    total += status.st_size
        if total <= self._budget - self._step:
            return
        for _, size, path in sorted(files):
            if total <= _KEPT * self._budget:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
