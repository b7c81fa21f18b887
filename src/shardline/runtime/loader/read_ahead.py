"""Reads weight files into the page cache, ahead of the ranks that copy from them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_CHUNK = 32 << 20
"""Bytes that are asked for at once."""


@contextmanager
def read_ahead(files: Sequence[str]) -> Iterator[None]:
    """Ask the system for all of `files`, in order, while the body runs.

    Ranks read tensors in the order of the model, and cut them, so storage would see small reads in any order. One
    thread of a node is enough: all of its ranks share the page cache. Bytes that are in it already are not read again.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_ask, args=(tuple(files), stop), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _ask(files: Sequence[str], stop: threading.Event) -> None:
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            return  # the rank that loads it says what is wrong
        try:
            for offset in range(0, os.fstat(descriptor).st_size, _CHUNK):
                if stop.is_set():
                    return
                os.posix_fadvise(descriptor, offset, _CHUNK, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        finally:
            os.close(descriptor)
