"""The front's handle on its head process, which talks to the nodes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from shardline.channel import Channel
from shardline.engine.children import Child
from shardline.messages.node import HeadToFront, StartHead, Stream
from shardline.segment.pulse import CHECK_INTERVAL

_MAX_FDS = 64
"""Descriptors that one message carries."""


class HeadProcess:
    """One head process, from its start to its end."""

    def __init__(self) -> None:
        """Start the process. It imports its modules, and then waits for `listen`."""
        ours, theirs = socket.socketpair()
        self._sockets, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, passed:
            self._child = Child("shardline.cluster.head", [theirs.fileno(), passed.fileno()])
        self._channel: Channel[HeadToFront] = Channel(ours, HeadToFront)  # type: ignore[arg-type]

    def listen(self, command: StartHead, on_message: Callable[[HeadToFront], None], on_end: Callable[[], None]) -> None:
        """Have the process listen and wait for nodes. A thread hands on its news; `on_end`: none will follow."""
        self.send(command)
        threading.Thread(target=self._read, args=(on_message, on_end), name="head-reader", daemon=True).start()
        threading.Thread(target=self._watch, name="head-watch", daemon=True).start()

    def send(self, message: object) -> None:
        """Send the process a message.

        Raises:
            OSError: it has ended.
        """
        self._channel.send(message)

    def attach(self, ends: dict[Stream, socket.socket]) -> None:
        """Hand over local ends of streams; the process has the nodes start what is at the far ends."""
        pairs = list(ends.items())
        for first in range(0, len(pairs), _MAX_FDS):
            part = pairs[first : first + _MAX_FDS]
            names = msgspec.msgpack.encode([stream for stream, _ in part])
            with contextlib.suppress(OSError):  # a head process that has ended ends the streams too
                socket.send_fds(self._sockets, [names], [sock.fileno() for _, sock in part])
        for _, sock in pairs:
            sock.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._child.poll() is not None

    def describe_end(self) -> str:
        """How the process has ended, for people."""
        return self._child.describe_end()

    def disconnect(self) -> None:
        """Close both connections; the process ends."""
        self._channel.close()
        self._sockets.close()

    def end(self, timeout: float) -> None:
        """Wait until the process ends, and kill it after `timeout` seconds."""
        self._child.end(timeout)

    def _read(self, on_message: Callable[[HeadToFront], None], on_end: Callable[[], None]) -> None:
        try:
            while True:
                on_message(self._channel.receive())
        except (EOFError, OSError, msgspec.MsgspecError):
            on_end()

    def _watch(self) -> None:
        """End a process that gives no sign of life."""
        while not self.has_ended:
            if self._child.is_silent():
                self._child.kill()
                self._channel.shutdown()
                return
            time.sleep(CHECK_INTERVAL)
