"""Work for all cores: forked processes that exchange messages of bytes with this one."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
import traceback
from collections.abc import Callable, Iterator
from io import BufferedReader, BufferedWriter

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of a two-way connection. Messages keep their borders."""

    def __init__(self, reader: BufferedReader, writer: BufferedWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: bytes) -> None:
        """Send a message; it arrives at once."""
        self._writer.write(_LENGTH.pack(len(message)) + message)
        self._writer.flush()

    def receive(self) -> bytes | None:
        """The next message; None: the other end is closed."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        return self._reader.read(length)

    def close(self) -> None:
        """Close this end."""
        self._reader.close()
        with contextlib.suppress(BrokenPipeError):  # the other end may have ended before it read everything
            self._writer.close()


class Worker:
    """A forked process that runs a function with its end of a channel."""

    def __init__(self, work: Callable[[Channel], None]) -> None:
        to_child, to_parent = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(to_child[1])
            os.close(to_parent[0])
            _run_and_exit(work, Channel(os.fdopen(to_child[0], "rb"), os.fdopen(to_parent[1], "wb")))
        os.close(to_child[0])
        os.close(to_parent[1])
        self._channel = Channel(os.fdopen(to_parent[0], "rb"), os.fdopen(to_child[1], "wb"))

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            RuntimeError: the process failed; it has written its traceback.
        """
        try:
            self._channel.send(message)
        except BrokenPipeError:
            raise RuntimeError("a process of the simulation has failed") from None

    def receive(self) -> bytes:
        """The next message.

        Raises:
            RuntimeError: the process failed; it has written its traceback.
        """
        message = self._channel.receive()
        if message is None:
            raise RuntimeError("a process of the simulation has failed")
        return message

    def close(self) -> None:
        """Close the channel; a process that still works ends when it next uses it."""
        self._channel.close()

    def join(self) -> None:
        """Wait for the end of the process. `close` all workers first: a later one has copies of earlier channels."""
        os.waitpid(self._process, 0)


def _run_and_exit(work: Callable[[Channel], None], channel: Channel) -> None:
    """Run the child. It must not run the parent's clean-up, so it ends here, whatever happens."""
    code = 1
    try:
        # The simulation makes no cycles, and looking for them takes a tenth of its time.
        gc.disable()
        work(channel)
        code = 0
    except BrokenPipeError:
        code = 0  # the parent wants no more
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def map_in_processes(work: Callable[[int], bytes], count: int, workers: int) -> Iterator[bytes]:
    """The results of `work(0)` to `work(count - 1)`, in order. Process w of `workers` does w, w + workers and so on.

    Raises:
        RuntimeError: a process failed; it has written its traceback.
    """

    def run(first: int, channel: Channel) -> None:
        for index in range(first, count, workers):
            channel.send(work(index))

    children = [Worker(lambda channel, first=first: run(first, channel)) for first in range(workers)]  # type: ignore[misc]
    try:
        for index in range(count):
            yield children[index % workers].receive()
    finally:
        close_all(children)


def close_all(workers: list[Worker]) -> None:
    """Close the channels of all workers, and wait until they have ended."""
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.join()
