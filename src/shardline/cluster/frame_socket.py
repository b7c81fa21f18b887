"""One end of a connection between hosts in an event loop."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable

from shardline.channel import FRAME_LENGTH, MAX_FRAME_BYTES, SEAL_BYTES, Seal

READ_BYTES = 1 << 20
"""Bytes that are read at a time, so that others get their turn."""


class FrameSocket:
    """One end of a connection in an event loop: nothing blocks, and what cannot be sent yet waits.

    One thread calls all methods and the callbacks: of `run_callbacks`.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_frames: Callable[[list[bytes]], None],
        on_end: Callable[[], None],
        *,
        seal: Seal | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """Read from now on. `on_frames` gets the bodies of whole frames, each of at most `max_bytes`.

        `on_end` is called once the other end has closed the connection, after its last frames; this end is closed then.
        """
        sock.setblocking(False)
        self._socket = sock
        self._selector = selector
        self._on_frames, self._on_end = on_frames, on_end
        self._seal = seal
        self._max_bytes = max_bytes + (SEAL_BYTES if seal else 0)
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._closing = False
        self.is_closed = False
        self._events = selectors.EVENT_READ
        selector.register(sock, self._events, self._handle)

    def send(self, body: bytes) -> None:
        """Send a frame. A connection that has ended, or that is being closed, drops it."""
        if self._closing:
            return
        if self._seal is not None:
            body = self._seal.seal(body)
        self._unsent.append(memoryview(FRAME_LENGTH.pack(len(body)) + body))
        if len(self._unsent) == 1:  # else the selector waits until there is room
            self._flush()

    def close(self) -> None:
        """Close this end once everything has left that was sent. What comes until then is dropped."""
        self._closing = True
        if not self._unsent:
            self.drop()

    def drop(self) -> None:
        """Close this end at once."""
        if not self.is_closed:
            self._closing = self.is_closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def finish(self, deadline: float) -> None:
        """Close this end of a connection between hosts. What was sent has time until `deadline` to arrive.

        The end waits for the other one: the kernel forgets what it has not sent yet if data comes after a close.
        """
        if self.is_closed:
            return
        with contextlib.suppress(OSError):
            while self._unsent:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self._socket.sendall(self._unsent.popleft())
            self._socket.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline and self._socket.recv(READ_BYTES):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self.drop()

    def _handle(self, events: int) -> None:
        # An event of the same turn may have closed this end.
        if events & selectors.EVENT_WRITE and not self.is_closed:
            self._flush()
        if events & selectors.EVENT_READ and not self.is_closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        frames: list[bytes] = []
        try:
            while (frame := self._take_frame()) is not None:
                frames.append(frame)
        except EOFError:
            data = b""
        if frames and not self._closing:
            self._on_frames(frames)
        if not data and not self.is_closed:
            was_closing = self._closing
            self.drop()
            if not was_closing:
                self._on_end()

    def _take_frame(self) -> bytes | None:
        """The body of the next frame that is whole.

        Raises:
            EOFError: it is too large, or not what the other end has sent.
        """
        if len(self._received) < FRAME_LENGTH.size:
            return None
        (size,) = FRAME_LENGTH.unpack_from(self._received)
        if size > self._max_bytes:
            raise EOFError(f"the peer announced a message of {size} bytes")
        if len(self._received) < (end := FRAME_LENGTH.size + size):
            return None
        body = bytes(memoryview(self._received)[FRAME_LENGTH.size : end])
        del self._received[:end]
        return body if self._seal is None else self._seal.open(body)

    def _flush(self) -> None:
        try:
            while self._unsent:
                rest = self._unsent[0][self._socket.send(self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the other end has gone; reading will say so
            self._unsent.clear()
        if self._closing and not self._unsent:
            self.drop()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._handle)
