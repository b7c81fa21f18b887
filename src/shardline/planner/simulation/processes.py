"""Work for all cores: forked processes that send their results back as bytes."""

from __future__ import annotations

import os
import struct
import traceback
from collections.abc import Callable, Iterator
from io import BufferedReader

_LENGTH = struct.Struct("<Q")


def map_in_processes(work: Callable[[int], bytes], count: int, workers: int) -> Iterator[bytes]:
    """The results of `work(0)` to `work(count - 1)`, in order. Process w of `workers` does w, w + workers and so on.

    Raises:
        RuntimeError: a process failed; it has written its traceback.
    """
    children = [_start(work, range(first, count, workers)) for first in range(workers)]
    try:
        for index in range(count):
            yield _read(children[index % workers][1])
    finally:
        for process, stream in children:
            stream.close()
            os.waitpid(process, 0)


def _start(work: Callable[[int], bytes], indices: range) -> tuple[int, BufferedReader]:
    """(process id, its results) of a new process that does the work of these indices."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, os.fdopen(reading, "rb")
    # The child. It must not run the parent's clean-up, so it ends here, whatever happens.
    code = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as stream:
            for index in indices:
                result = work(index)
                stream.write(_LENGTH.pack(len(result)) + result)
        code = 0
    except BrokenPipeError:
        code = 0  # the parent wants no more
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _read(stream: BufferedReader) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise RuntimeError("a process of the simulation has failed")
    (length,) = _LENGTH.unpack(head)
    return stream.read(length)
