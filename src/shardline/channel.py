"""Typed messages over a socket: all processes talk over nothing else. On one host it is a socketpair.

A frame is a 4-byte little-endian length and a body, which is msgpack of a declared type. The death of a process shows
at once as end of file; a process that lives but hangs is found by probes (engine/watchdog.py).

A connection between hosts begins with a handshake. Both ends prove that they know a secret, and agree on what the
connection is for and on a key of its own, with which frames are sealed. The key comes from a Diffie-Hellman exchange,
so that what was sent stays unreadable for somebody who learns the secret later. What a stranger sends is read up to the
length of a greeting, takes no lasting memory, and reaches nobody.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

MAX_FRAME_BYTES = 1 << 28
READ_BYTES = 1 << 20
"""Bytes that a `FrameSocket` reads at a time, so that others get their turn."""
HANDSHAKE_SECONDS = 2.0
_SEAL_BYTES = 16
"""Bytes that a seal adds to a frame."""
_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

_MAGIC = b"shardline 1\r\n\r\n\0"
"""An HTTP server takes it for a bad request, so that a port of one is noticed at once."""
_MAX_PURPOSE_BYTES = 96
_KEY_BYTES = 32
_CHALLENGE = struct.Struct(f"{len(_MAGIC)}s{_KEY_BYTES}s")
"""The listening end begins: with the magic bytes and its public key, which is drawn for this connection."""
_GREETING = struct.Struct(f"{len(_MAGIC)}s{_MAX_PURPOSE_BYTES}s{_KEY_BYTES}s")
"""The connecting end: magic bytes, what the connection is for, its public key. Its proof follows."""
_PROOF_BYTES = 32
_MAX_UNPROVEN = 256
"""Connections that may be in their handshake at once; the oldest makes room for a new one."""
_KEEPALIVE_SECONDS = 60

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


class Seal:
    """AES-256-GCM over numbered frames, so a frame that is altered, repeated, missing or out of order is noticed.

    Each direction has its own count. A key is good for one connection, because numbers begin at 0.
    """

    _NONCE = struct.Struct("<IQ")

    def __init__(self, key: bytes, *, is_listener: bool) -> None:
        """`key`: 32 bytes. `is_listener`: whether this is the end that accepted the connection."""
        # Processes of one host need no seals, and the import takes memory and time.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert len(key) == 32
        self._cipher = AESGCM(key)
        self._invalid = InvalidTag
        self._own, self._other = int(is_listener), int(not is_listener)
        self._sealed = self._opened = 0

    def seal(self, body: bytes) -> bytes:
        """The next frame to send."""
        nonce = self._NONCE.pack(self._own, self._sealed)
        self._sealed += 1
        return self._cipher.encrypt(nonce, body, None)

    def open(self, frame: bytes | bytearray) -> bytes:
        """The body of the next frame that has come.

        Raises:
            EOFError: it is not the frame that the other end has sent as its next one.
        """
        nonce = self._NONCE.pack(self._other, self._opened)
        self._opened += 1
        try:
            return self._cipher.decrypt(nonce, frame, None)
        except self._invalid:
            raise EOFError("a frame was altered on its way, or is not the next one") from None


class Channel(Generic[Incoming]):
    """One end of a connection. It sends any struct and receives structs of the type `Incoming`.

    Several threads may send; only one may receive.
    """

    def __init__(self, sock: socket.socket, incoming: type[Incoming], seal: Seal | None = None) -> None:
        """`seal`: encrypts the frames; None: both ends are on this host."""
        sock.setblocking(True)
        self._socket = sock
        self._seal = seal
        self._max_bytes = MAX_FRAME_BYTES + (_SEAL_BYTES if seal else 0)
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
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout: float | None = None) -> Incoming:
        """The next message.

        Raises:
            EOFError: the peer has ended, or somebody has altered what it sent.
            TimeoutError: no message came within `timeout` seconds.
            msgspec.ValidationError: the peer sent a message of another type.
        """
        self._socket.settimeout(timeout)
        try:
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
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


def run_callbacks(selector: selectors.BaseSelector, timeout: float) -> None:
    """One turn of an event loop: wait up to `timeout` seconds, and call what is registered for each ready socket."""
    for key, events in selector.select(timeout):
        key.data(events)


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
        self._max_bytes = max_bytes + (_SEAL_BYTES if seal else 0)
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
        self._unsent.append(memoryview(_LENGTH.pack(len(body)) + body))
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
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size > self._max_bytes:
            raise EOFError(f"the peer announced a message of {size} bytes")
        if len(self._received) < (end := _LENGTH.size + size):
            return None
        body = bytes(memoryview(self._received)[_LENGTH.size : end])
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


class HandshakeRefused(ConnectionError):
    """A program listens there, but it ends the handshake, or it speaks another protocol."""


class Connection(NamedTuple):
    """A connection between hosts whose ends have proven to each other that they know the secret."""

    socket: socket.socket
    seal: Seal


@dataclass(frozen=True)
class _Handshake:
    """What both ends know once the public keys have travelled."""

    secret: bytes
    purpose: bytes
    connecting: bytes
    listening: bytes
    """The public keys of both ends. They are new for each connection, and so are the proofs."""

    def proof(self, role: bytes) -> bytes:
        """What the connecting or the listening end shows."""
        return self._mac(self.secret, role)

    def seal(self, own: X25519PrivateKey, *, is_listener: bool) -> Seal:
        """The seal of one end.

        Raises:
            ValueError: the other end's public key is none.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        peer = X25519PublicKey.from_public_bytes(self.connecting if is_listener else self.listening)
        mixed = hmac.digest(self.secret, own.exchange(peer), "sha256")
        return Seal(self._mac(mixed, b"key"), is_listener=is_listener)

    def _mac(self, key: bytes, role: bytes) -> bytes:
        text = _MAGIC + role.ljust(8, b"\0") + self.purpose + self.connecting + self.listening
        return hmac.digest(key, text, "sha256")


def connect(address: str, port: int, secret: bytes, purpose: str, timeout: float) -> Connection:
    """Connect to a `Listener`, within `timeout` seconds. A purpose has at most 96 bytes.

    Raises:
        HandshakeRefused: a program listens there, but it does not have the secret, or does not await this connection.
        OSError: nothing listens there, or nobody answers in time.
    """
    deadline = time.monotonic() + timeout
    sock = socket.create_connection((address, port), timeout)
    try:
        _configure(sock)
        private, public = _draw_keys()
        name = purpose.encode().ljust(_MAX_PURPOSE_BYTES, b"\0")
        assert len(name) == _MAX_PURPOSE_BYTES
        sock.sendall(_GREETING.pack(_MAGIC, name, public))
        _, theirs = _CHALLENGE.unpack(_read(sock, _CHALLENGE.size, deadline, _MAGIC))
        handshake = _Handshake(secret, name, public, theirs)
        sock.sendall(handshake.proof(b"connect"))
        if not hmac.compare_digest(_read(sock, _PROOF_BYTES, deadline), handshake.proof(b"listen")):
            raise HandshakeRefused("it does not have the secret")
        return Connection(sock, handshake.seal(private, is_listener=False))
    except (ConnectionError, ValueError) as error:
        sock.close()
        raise error if isinstance(error, HandshakeRefused) else HandshakeRefused("it closed the connection") from error
    except BaseException:
        sock.close()
        raise


@dataclass
class _Unproven:
    """A connection in its handshake."""

    connection: socket.socket
    private: X25519PrivateKey
    public: bytes
    deadline: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_SECONDS)
    received: bytes = b""


class Listener:
    """Accepts connections of those who know a secret, in an event loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: str,
        port: int,
        secret: bytes,
        is_awaited: Callable[[str], bool],
        on_connection: Callable[[str, Connection], None],
    ) -> None:
        """Listen on an IP address; `port` 0: any free one. `on_connection` gets the purpose of each new connection.

        `is_awaited`: whether there may be a connection for a purpose.

        Raises:
            OSError: this host does not have the address, or the port is taken.
        """
        assert len(secret) >= 16, "a secret that can be guessed protects nothing"
        _draw_keys()  # its imports take longer than a handshake may
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, port), family=family, backlog=128)
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self.num_refused = 0
        """Handshakes whose proof was wrong: the other end has another secret."""
        self._selector = selector
        self._secret = secret
        self._is_awaited = is_awaited
        self._on_connection = on_connection
        self._unproven: dict[socket.socket, _Unproven] = {}
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    def drop_silent(self) -> None:
        """Drop connections whose handshake takes too long. Call this every second."""
        now = time.monotonic()
        while self._unproven and (oldest := next(iter(self._unproven.values()))).deadline <= now:
            self._drop(oldest)

    def close(self) -> None:
        """Stop listening. Connections that were handed on stay."""
        for unproven in list(self._unproven.values()):
            self._drop(unproven)
        self._selector.unregister(self._server)
        self._server.close()

    def _accept(self, _events: int) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            time.sleep(0.01)  # without descriptors, it stays ready
            return
        if len(self._unproven) >= _MAX_UNPROVEN:
            self._drop(next(iter(self._unproven.values())))
        connection.setblocking(False)
        unproven = self._unproven[connection] = _Unproven(connection, *_draw_keys())
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._receive(unproven))
        try:
            connection.send(_CHALLENGE.pack(_MAGIC, unproven.public))
        except OSError:
            self._drop(unproven)

    def _receive(self, unproven: _Unproven) -> None:
        connection = unproven.connection
        if connection not in self._unproven:  # dropped in this turn of the loop
            return
        size = _GREETING.size + _PROOF_BYTES
        try:
            part = connection.recv(size - len(unproven.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        unproven.received += part
        if not part:
            self._drop(unproven)
        elif len(unproven.received) == size:
            if (checked := self._check(unproven)) is None:
                self._drop(unproven)
                return
            self._selector.unregister(connection)
            del self._unproven[connection]
            self._on_connection(*checked)

    def _check(self, unproven: _Unproven) -> tuple[str, Connection] | None:
        """The purpose and the connection of a handshake, which gets our proof; None: it is refused."""
        magic, name, theirs = _GREETING.unpack_from(unproven.received)
        purpose = name.rstrip(b"\0").decode(errors="replace")
        if magic != _MAGIC or not self._is_awaited(purpose):
            return None
        handshake = _Handshake(self._secret, name, theirs, unproven.public)
        if not hmac.compare_digest(unproven.received[_GREETING.size :], handshake.proof(b"connect")):
            self.num_refused += 1
            return None
        try:
            seal = handshake.seal(unproven.private, is_listener=True)
            unproven.connection.send(handshake.proof(b"listen"))
            _configure(unproven.connection)
        except (OSError, ValueError):
            return None
        return purpose, Connection(unproven.connection, seal)

    def _drop(self, unproven: _Unproven) -> None:
        self._selector.unregister(unproven.connection)
        del self._unproven[unproven.connection]
        unproven.connection.close()


def _draw_keys() -> tuple[X25519PrivateKey, bytes]:
    """A private and a public key for one connection."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _configure(sock: socket.socket) -> None:
    """Have a socket send at once, and notice if a firewall forgets the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)


def _read(sock: socket.socket, size: int, deadline: float, beginning: bytes = b"") -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(size - len(data))
        if not part:
            raise HandshakeRefused("it closed the connection")
        data += part
        if not data.startswith(beginning[: len(data)]):
            raise HandshakeRefused("another program listens there")
    return data
