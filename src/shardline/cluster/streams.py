"""The local ends of streams: sockets of processes on this host, whose frames travel to another host and back."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from shardline.channel import MAX_FRAME_BYTES
from shardline.messages.node import Stream

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20


def frame(body: bytes) -> bytes:
    """A message of a channel as the channel would send it."""
    return _LENGTH.pack(len(body)) + body


@dataclass
class _End:
    stream: Stream
    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: deque[memoryview] = field(default_factory=deque)
    closing: bool = False


class Streams:
    """Moves frames between local sockets and the owner, which passes them on. One thread calls all methods.

    Frames are passed on whole, so the owner may put frames of its own between them.
    """

    def __init__(
        self,
        poller: zmq.Poller,
        on_data: Callable[[Stream, bytes], None],
        on_end: Callable[[Stream], None],
    ) -> None:
        """`on_end` is called once a process on this host has closed its end; the stream is forgotten by then."""
        self._poller = poller
        self._on_data = on_data
        self._on_end = on_end
        self._by_fd: dict[int, _End] = {}
        self._ends: dict[Stream, _End] = {}

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._ends

    def all(self) -> list[Stream]:
        """The streams that have an end here."""
        return list(self._ends)

    def attach(self, stream: Stream, sock: socket.socket) -> None:
        """Serve the local end of a stream from now on; this object closes the socket."""
        sock.setblocking(False)
        self._ends[stream] = self._by_fd[sock.fileno()] = _End(stream, sock)
        self._poller.register(sock.fileno(), zmq.POLLIN)

    def write(self, stream: Stream, frames: bytes) -> None:
        """Send frames to the process on this host; those of a stream that has ended are dropped."""
        end = self._ends.get(stream)
        if end is not None and not end.closing:
            end.unsent.append(memoryview(frames))
            self._flush(end)

    def close(self, stream: Stream, last_frame: bytes = b"") -> None:
        """Close the local end of a stream, after all that was written and `last_frame`."""
        end = self._ends.get(stream)
        if end is None or end.closing:
            return
        if last_frame:
            end.unsent.append(memoryview(last_frame))
        end.closing = True
        self._flush(end)

    def close_all(self) -> None:
        """Close all ends at once."""
        for end in list(self._ends.values()):
            self._forget(end)

    def handle_event(self, fd: int, event: int) -> None:
        """Read from or write to a socket that the poller has found ready. Other descriptors are ignored."""
        end = self._by_fd.get(fd)
        if end is None:
            return
        if event & zmq.POLLOUT:
            self._flush(end)
        if event & ~zmq.POLLOUT and end.stream in self._ends:
            self._read(end)

    def _read(self, end: _End) -> None:
        try:
            data = end.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        end.received += data
        if (whole := _whole_frames(end.received)) and not end.closing:
            self._on_data(end.stream, bytes(end.received[:whole]))
        del end.received[:whole]
        if not data:
            self._forget(end)
            if not end.closing:
                self._on_end(end.stream)

    def _flush(self, end: _End) -> None:
        try:
            while end.unsent:
                sent = end.sock.send(end.unsent[0])
                end.unsent[0] = end.unsent[0][sent:]
                if not end.unsent[0]:
                    end.unsent.popleft()
        except BlockingIOError:
            self._poller.register(end.sock.fileno(), zmq.POLLIN | zmq.POLLOUT)
            return
        except OSError:  # the process has ended; reading will say so
            end.unsent.clear()
        if end.closing:
            self._forget(end)
        else:
            self._poller.register(end.sock.fileno(), zmq.POLLIN)

    def _forget(self, end: _End) -> None:
        fd = end.sock.fileno()
        with contextlib.suppress(KeyError):
            self._poller.unregister(fd)
        self._by_fd.pop(fd, None)
        self._ends.pop(end.stream, None)
        end.sock.close()


def _whole_frames(data: bytearray) -> int:
    """The bytes that whole frames take at the beginning of `data`. A frame that is too large ends the stream."""
    start = 0
    while len(data) - start >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(data, start)
        if size > MAX_FRAME_BYTES or len(data) - start - _LENGTH.size < size:
            break
        start += _LENGTH.size + size
    return start
