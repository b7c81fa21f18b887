"""How the ranks of several hosts find each other and connect, and how ranks connect to an engine on another host.

Each rank listens on its host's address, but only until its groups have formed. It publishes its port in a store and
connects to the lower ranks. Both ends of a connection prove that they know the launch's nonce, and they agree which
group and which ranks the connection is for. A connection that does not prove it within two seconds is dropped. An
engine listens in the same way until all of its ranks on other hosts have connected.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_DOMAIN = b"shardline tensor connection 1"
_CHALLENGE_BYTES = 32
_MAC_BYTES = 32
_NAME_BYTES = 64
_HELLO = struct.Struct(f"<{_NAME_BYTES}sII{_CHALLENGE_BYTES}s{_MAC_BYTES}s")
"""The name of the group, the ranks that connect and listen, a challenge, and a MAC."""
_HELLO_SECONDS = 2.0
_MAX_UNPROVEN = 64
"""Connections that may be in their hello at once; the oldest makes room for a new one."""
_RETRY_SECONDS = 0.1
_KEEPALIVE_SECONDS = 60
_ENGINE = (1 << 32) - 1
"""The number that stands for the engine in a connection of a rank to it."""


class Store(Protocol):
    """Values that all ranks of a launch can set and get."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value; each key is set once."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of a key. Waits until it is set.

        Raises:
            TimeoutError: nobody has set it within `timeout_s` seconds.
        """


class LocalStore:
    """A store for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `Store.get`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(f"nobody has set {key}")
            return self._values[key]


@dataclass(frozen=True)
class Meeting:
    """What a rank needs to meet the ranks of other hosts."""

    store: Store
    address: str
    """The IP address of this rank's host on which it listens."""
    nonce: bytes
    """A secret that only the ranks of this launch know, at least 16 bytes."""
    timeout: float
    """Seconds after which ranks that have not connected count as missing."""


class Connection(NamedTuple):
    """A connection whose ends have proven to each other that they belong to the launch."""

    socket: socket.socket
    key: bytes
    """32 secret bytes, drawn for this connection, that only its two ends know."""


class _Purpose(NamedTuple):
    """What a connection is for."""

    group: str
    connecting: int
    """The rank that connects. If both ends are ranks, it is the higher one."""
    listening: int

    def mac(self, nonce: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
        """The proof of one end; `own` and `other` are the challenges of both ends."""
        purpose = struct.pack(f"<{_NAME_BYTES}sII", self.group.encode(), self.connecting, self.listening)
        return hmac.digest(nonce, _DOMAIN + role + purpose + own + other, "sha256")

    def connection(self, sock: socket.socket, nonce: bytes, listening: bytes, connecting: bytes) -> Connection:
        """A proven connection, from the challenges of its listening and its connecting end."""
        return Connection(sock, self.mac(nonce, b"key", listening, connecting))


def _steps_of(rank: int) -> _Purpose:
    return _Purpose("steps", rank, _ENGINE)


def connect_ranks(
    meeting: Meeting, rank: int, groups: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, socket.socket]]:
    """Connect `rank` to its peers: for each group (or link), by its name, a socket to each other rank in it.

    Every rank of a group calls this with the same name and ranks for it. Names have at most 64 bytes.

    Raises:
        TimeoutError: some ranks did not connect in time. The message names them.
    """
    assert len(meeting.nonce) >= 16, "a nonce that can be guessed protects nothing"
    assert all(len(name.encode()) <= _NAME_BYTES for name in groups)
    deadline = time.monotonic() + meeting.timeout
    pairs = [(name, peer) for name, ranks in groups.items() for peer in ranks if peer != rank]
    awaited = {_Purpose(name, peer, rank) for name, peer in pairs if peer > rank}
    listener = _Listener(meeting.address, meeting.nonce, awaited) if awaited else None
    found: dict[_Purpose, Connection] = {}
    problems: dict[int, str] = {}
    try:
        if listener is not None:
            meeting.store.set(f"address/{rank}", listener.address.encode())
        for name, peer in pairs:
            purpose = _Purpose(name, rank, peer)
            if peer < rank and (connection := _connect(meeting, purpose, deadline, problems)) is not None:
                found[purpose] = connection
    except BaseException:
        if listener is not None:
            listener.finish(0.0)
        raise
    if listener is not None:
        found |= listener.finish(deadline)
    connected = {(p.group, p.connecting if p.listening == rank else p.listening): s for p, s in found.items()}
    missing = sorted({pair[1] for pair in pairs if pair not in connected})
    if missing:
        for connection in connected.values():
            connection.socket.close()
        names = ", ".join(f"rank {peer}" + (f" ({problems[peer]})" if peer in problems else "") for peer in missing)
        raise TimeoutError(f"rank {rank} waited {meeting.timeout:g} s for connections; missing: {names}")
    result: dict[str, dict[int, socket.socket]] = {name: {} for name in groups}
    for (name, peer), connection in connected.items():
        connection.socket.settimeout(None)
        result[name][peer] = connection.socket
    return result


def connect_to_engine(address: str, nonce: bytes, rank: int, timeout: float) -> Connection:
    """Connect a rank to its engine's `EngineListener`, which listens at `address` ("host:port").

    Raises:
        TimeoutError: the engine could not be reached within `timeout` seconds. The message says why.
    """
    try:
        connection = _reach(address, nonce, _steps_of(rank), time.monotonic() + timeout)
    except TimeoutError as error:
        raise TimeoutError(f"rank {rank} cannot connect to its engine within {timeout:g} s: {error}") from None
    _configure(connection.socket)
    return connection


class EngineListener:
    """Awaits the connections of an engine's ranks on other hosts, in a thread of its own."""

    def __init__(self, address: str, nonce: bytes, ranks: Collection[int]) -> None:
        """Listen on the IP address `address`, until all of `ranks` have connected.

        Raises:
            OSError: this host does not have the address.
        """
        self._listener = _Listener(address, nonce, {_steps_of(rank) for rank in ranks})
        self.address = self._listener.address
        """Where ranks connect: "host:port"."""

    def finish(self, timeout: float) -> dict[int, Connection]:
        """Wait up to `timeout` seconds for all ranks, and stop listening; returns the connection of each rank."""
        found = self._listener.finish(time.monotonic() + timeout)
        for connection in found.values():
            connection.socket.settimeout(None)
            _configure(connection.socket)
        return {purpose.connecting: connection for purpose, connection in found.items()}


def _configure(sock: socket.socket) -> None:
    """Have a socket send at once, and notice if a firewall forgets the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)


def _connect(meeting: Meeting, purpose: _Purpose, deadline: float, problems: dict[int, str]) -> Connection | None:
    """A connection to a lower rank. None: there is none in time, and `problems` says why."""
    peer = purpose.listening
    problems[peer] = "it has not published an address"
    try:
        address = meeting.store.get(f"address/{peer}", max(0.0, deadline - time.monotonic())).decode()
    except TimeoutError:
        return None
    try:
        return _reach(address, meeting.nonce, purpose, deadline)
    except TimeoutError as error:
        problems[peer] = str(error)
        return None


def _reach(address: str, nonce: bytes, purpose: _Purpose, deadline: float) -> Connection:
    """A proven connection to a listener; tries again until `deadline`.

    Raises:
        TimeoutError: there is none in time. The message says why the last try failed.
    """
    problem = f"{address}: there was no time left"
    while (left := deadline - time.monotonic()) > 0:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=left)
        except OSError as error:
            problem = f"{address}: {error.strerror or error}"
        else:
            try:
                connection.settimeout(left)
                proven = _prove_to_listener(connection, nonce, purpose)
                connection.settimeout(None)
                return proven
            except OSError as error:
                problem = f"{address} refused the connection: {error}"
                connection.close()
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError(problem)


def _prove_to_listener(connection: socket.socket, nonce: bytes, purpose: _Purpose) -> Connection:
    """The connecting end of the hello: it reads a challenge, answers with its own, and checks the other end's proof.

    Raises:
        ConnectionError: the other end refuses, or it cannot prove that it belongs to this launch.
    """
    theirs, ours = _read(connection, _CHALLENGE_BYTES), secrets.token_bytes(_CHALLENGE_BYTES)
    proof = purpose.mac(nonce, b"connect", ours, theirs)
    connection.sendall(_HELLO.pack(purpose.group.encode(), purpose.connecting, purpose.listening, ours, proof))
    if not hmac.compare_digest(_read(connection, _MAC_BYTES), purpose.mac(nonce, b"listen", theirs, ours)):
        raise ConnectionError("it does not belong to this launch")
    return purpose.connection(connection, nonce, theirs, ours)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


@dataclass
class _Unproven:
    """A connection in its hello."""

    connection: socket.socket
    challenge: bytes
    deadline: float
    received: bytes = b""


class _Listener:
    """Accepts connections with certain purposes in a thread of its own. What strangers send takes no lasting memory."""

    def __init__(self, address: str, nonce: bytes, awaited: set[_Purpose]) -> None:
        assert len(nonce) >= 16, "a nonce that can be guessed protects nothing"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=128)
        self._server.setblocking(False)
        self.address = f"{address}:{self._server.getsockname()[1]}"
        self._nonce = nonce
        self._awaited = awaited
        self._found: dict[_Purpose, Connection] = {}
        self._unproven: dict[socket.socket, _Unproven] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="tensor-listener", daemon=True)
        self._thread.start()

    def finish(self, deadline: float) -> dict[_Purpose, Connection]:
        """Wait for all awaited connections, but not beyond `deadline`; stop listening, and return what has come."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._stopped.set()
        self._thread.join()
        self._server.close()
        return self._found

    def _serve(self) -> None:
        while len(self._found) < len(self._awaited) and not self._stopped.is_set():
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._server:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._unproven:
                    self._read_hello(self._unproven[key.fileobj])
            now = time.monotonic()
            while self._unproven and (oldest := next(iter(self._unproven.values()))).deadline <= now:
                self._drop(oldest)
        for unproven in list(self._unproven.values()):
            self._drop(unproven)
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        if len(self._unproven) >= _MAX_UNPROVEN:
            self._drop(next(iter(self._unproven.values())))
        connection.setblocking(False)
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        unproven = _Unproven(connection, challenge, time.monotonic() + _HELLO_SECONDS)
        self._unproven[connection] = unproven
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(challenge)
        except OSError:
            self._drop(unproven)

    def _read_hello(self, unproven: _Unproven) -> None:
        connection = unproven.connection
        try:
            part = connection.recv(_HELLO.size - len(unproven.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        unproven.received += part
        if not part:
            self._drop(unproven)
        elif len(unproven.received) == _HELLO.size:
            if (checked := self._check(unproven)) is None:
                self._drop(unproven)
                return
            purpose, proven = checked
            self._selector.unregister(connection)
            del self._unproven[connection]
            if (former := self._found.pop(purpose, None)) is not None:
                former.socket.close()  # the rank gave this one up, and connected again
            self._found[purpose] = proven

    def _check(self, unproven: _Unproven) -> tuple[_Purpose, Connection] | None:
        """A connection whose hello is complete, once it has our proof, and its purpose; None: refused."""
        name, connecting, listening, theirs, proof = _HELLO.unpack(unproven.received)
        purpose = _Purpose(name.rstrip(b"\0").decode(errors="replace"), connecting, listening)
        if purpose not in self._awaited:
            return None
        if not hmac.compare_digest(proof, purpose.mac(self._nonce, b"connect", theirs, unproven.challenge)):
            return None
        try:
            unproven.connection.send(purpose.mac(self._nonce, b"listen", unproven.challenge, theirs))
        except OSError:
            return None
        return purpose, purpose.connection(unproven.connection, self._nonce, unproven.challenge, theirs)

    def _drop(self, unproven: _Unproven) -> None:
        self._selector.unregister(unproven.connection)
        del self._unproven[unproven.connection]
        unproven.connection.close()
