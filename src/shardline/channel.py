"""Typed messages over a socketpair: the one wire between front, engine and workers on a host.

A frame is a 4-byte little-endian length and a msgpack body of a declared type. A peer that ends is seen at once as
end of file, so nobody needs a heartbeat to notice a death.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

Incoming = TypeVar("Incoming")


def encode(message: object) -> bytes:
    """The body of a frame.

    Raises:
        ValueError: the message cannot be encoded, or is larger than a frame may be.
    """
    try:
        body = _ENCODER.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise ValueError(f"a value cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is larger than the limit of {MAX_FRAME_BYTES}")
    return body


class Channel(Generic[Incoming]):
    """One end of a socketpair that sends any struct and receives `Incoming` ones.

    Sending is safe from several threads; receiving is for one.
    """

    def __init__(self, sock: socket.socket, incoming: type[Incoming]) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._send_lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            ValueError: the message is larger than a frame may be.
            OSError: the peer is gone.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Send what `encode` made, for example a message that goes to several peers.

        Raises:
            OSError: the peer is gone.
        """
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout: float | None = None) -> Incoming:
        """The next message.

        Raises:
            EOFError: the peer has ended.
            TimeoutError: nothing came within `timeout` seconds.
            msgspec.ValidationError: the peer sent something else than it should.
        """
        self._socket.settimeout(timeout)
        try:
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise EOFError(f"the peer announced a message of {size} bytes")
            return self._decoder.decode(self._read(size))
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

    def fileno(self) -> int:
        """The socket's file descriptor, for select and for inheritance."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the peer sees end of file."""
        self._socket.close()
