"""Typed messages over a socket: all processes talk over nothing else. On one host it is a socketpair.

A frame is a 4-byte little-endian length and a body, which is msgpack of a declared type. The death of a process shows
at once as end of file; a process that lives but hangs is found by probes (engine/watchdog.py). A connection between
hosts begins with a handshake (handshake.py), which gives it a seal.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from shardline.seal import SEAL_BYTES, Seal

MAX_FRAME_BYTES = 1 << 28
FRAME_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
Incoming = TypeVar("Incoming")


def encode_message(message: object) -> bytes:
    """The body of a frame.

    Raises:
        ValueError: the message cannot be encoded, or it is larger than MAX_FRAME_BYTES.
    """
    try:
        body = _ENCODER.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise ValueError(f"a value cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is larger than the limit of {MAX_FRAME_BYTES}")
    return body


def readable(fds: Iterable[int], timeout: float | None = 0.0) -> list[int]:
    """The descriptors that have data or whose peer has ended, after waiting up to `timeout` seconds for the first one.

    Without a time-out it waits for ever. `select.select` refuses numbers above 1023, and a front with many connections
    gives its children such numbers.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else 1000 * max(0.0, timeout))]


class Channel(Generic[Incoming]):
    """One end of a connection. It sends any struct and receives structs of the type `Incoming`.

    Several threads may send; only one may receive.
    """

    def __init__(self, sock: socket.socket, incoming: type[Incoming], seal: Seal | None = None) -> None:
        """`seal`: encrypts the frames; None: both ends are on this host."""
        sock.setblocking(True)
        self._socket = sock
        self._seal = seal
        self._max_bytes = MAX_FRAME_BYTES + (SEAL_BYTES if seal else 0)
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._send_lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            ValueError: the message cannot be encoded, or it is larger than MAX_FRAME_BYTES.
            OSError: the peer is gone.
        """
        self.send_encoded(encode_message(message))

    def send_encoded(self, body: bytes) -> None:
        """Send a body that `encode_message` made, for example to several peers.

        Raises:
            OSError: the peer is gone.
        """
        with self._send_lock:
            if self._seal is not None:
                body = self._seal.seal(body)
            self._socket.sendall(FRAME_LENGTH.pack(len(body)) + body)

    def receive(self, timeout: float | None = None) -> Incoming:
        """The next message.

        Raises:
            EOFError: the peer has ended, or somebody has altered what it sent.
            TimeoutError: no message came within `timeout` seconds.
            msgspec.ValidationError: the peer sent a message of another type.
        """
        self._socket.settimeout(timeout)
        try:
            (size,) = FRAME_LENGTH.unpack(self._read(FRAME_LENGTH.size))
            if size > self._max_bytes:
                raise EOFError(f"the peer announced a message of {size} bytes")
            body: bytes | bytearray = self._read(size)
            if self._seal is not None:
                body = self._seal.open(body)
            return self._decoder.decode(body)
        except ConnectionError as error:
            raise EOFError("the peer has ended") from error
        finally:
            self._socket.settimeout(None)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("the peer has ended")
            view = view[count:]
        return data

    def peer_has_ended(self) -> bool:
        """Whether the peer has closed its end, even if messages are left to read."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        """The socket's file descriptor, for `select` and for child processes."""
        return self._socket.fileno()

    def shutdown(self) -> None:
        """End the connection from any thread: one that waits in `receive` gets EOFError, as the peer does."""
        with contextlib.suppress(OSError):  # the peer is gone, or this end is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; the peer sees end of file."""
        self._socket.close()
