"""The handshake with which a connection between hosts begins.

Both ends prove that they know a secret, and agree on what the connection is for and on a key of its own, with which
frames are sealed. The key comes from a Diffie-Hellman exchange, so that what was sent stays unreadable for somebody who
learns the secret later. What a stranger sends is read up to the length of a greeting, takes no lasting memory, and
reaches nobody.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardline.seal import Seal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

HANDSHAKE_SECONDS = 2.0
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


def run_callbacks(selector: selectors.BaseSelector, timeout: float) -> None:
    """One turn of an event loop: wait up to `timeout` seconds, and call what is registered for each ready socket."""
    for key, events in selector.select(timeout):
        key.data(events)


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
