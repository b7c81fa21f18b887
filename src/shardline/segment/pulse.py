"""Signs of life of a child process, on a page of shared memory that a thread without Python's lock writes to."""

from __future__ import annotations

import mmap
import os
import struct

from shardline import _cpu

_FIELDS = struct.Struct("<qq")


class Pulse:
    """The page of one child. The parent creates it, and the child inherits the descriptor `fd`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("shardline-pulse")
        try:
            os.ftruncate(self.fd, mmap.PAGESIZE)
            self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        except BaseException:
            self.release_fd()
            raise

    def release_fd(self) -> None:
        """Close the descriptor, once the child has inherited it. The page stays readable."""
        os.close(self.fd)

    @property
    def beats(self) -> int:
        """How often the child's thread has written."""
        return int(_FIELDS.unpack_from(self._page)[0])

    @property
    def work(self) -> int:
        """Pieces of work that the child has finished, such as kernels; it grows as long as the child gets on."""
        return int(_FIELDS.unpack_from(self._page)[1])


def start_pulse(fd: int) -> None:
    """Begin to show signs of life on the page behind `fd`, until this process ends."""
    _cpu.start_pulse(fd)
    os.close(fd)


def note_work() -> None:
    """Count a piece of work that this process has seen done. Kernels of the CPU count themselves."""
    _cpu.note_work()
