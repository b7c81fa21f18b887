"""How the ranks of several hosts find each other and connect, and how ranks connect to an engine on another host.

Each rank listens on its host's address, but only until its groups have formed. It publishes its port in a store and
connects to the lower ranks. The handshake of a connection (`channel.py`) proves that both ends know the launch's nonce,
and says which group and which ranks it is for. An engine listens in the same way until all of its ranks on other hosts
have connected.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardline.handshake import Connection, HandshakeRefused, Listener, connect, run_callbacks

_MAX_NAME_BYTES = 64
_RETRY_SECONDS = 0.1


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


def connect_ranks(
    meeting: Meeting, rank: int, groups: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, socket.socket]]:
    """Connect `rank` to its peers: for each group (or link), by its name, a socket to each other rank in it.

    Every rank of a group calls this with the same name and ranks for it. Names have at most 64 bytes. Tensors need the
    speed of the bare sockets, so nothing is encrypted after the handshake.

    Raises:
        TimeoutError: some ranks did not connect in time. The message names them.
    """
    assert all(len(name.encode()) <= _MAX_NAME_BYTES for name in groups)
    deadline = time.monotonic() + meeting.timeout
    # The higher rank connects.
    purposes = {
        (name, peer): f"{name}: {max(rank, peer)} to {min(rank, peer)}"
        for name, ranks in groups.items()
        for peer in ranks
        if peer != rank
    }
    awaited = [purpose for (_, peer), purpose in purposes.items() if peer > rank]
    arrivals = Arrivals(meeting.address, meeting.nonce, awaited) if awaited else None
    found: dict[str, Connection] = {}
    problems: dict[int, str] = {}
    try:
        if arrivals is not None:
            meeting.store.set(f"address/{rank}", arrivals.address.encode())
        for (_, peer), purpose in purposes.items():
            if peer < rank and (connection := _meet(meeting, peer, purpose, deadline, problems)) is not None:
                found[purpose] = connection
    except BaseException:
        if arrivals is not None:
            arrivals.finish(0.0)
        raise
    if arrivals is not None:
        found |= arrivals.finish(deadline)
    if missing := sorted({peer for (_, peer), purpose in purposes.items() if purpose not in found}):
        for connection in found.values():
            connection.socket.close()
        names = ", ".join(f"rank {peer}" + (f" ({problems[peer]})" if peer in problems else "") for peer in missing)
        raise TimeoutError(f"rank {rank} waited {meeting.timeout:g} s for connections; missing: {names}")
    result: dict[str, dict[int, socket.socket]] = {name: {} for name in groups}
    for (name, peer), purpose in purposes.items():
        result[name][peer] = found[purpose].socket
        result[name][peer].settimeout(None)
    return result


def steps_of(rank: int) -> str:
    """The purpose of a rank's connection to its engine."""
    return f"steps of {rank}"


def connect_to_engine(address: str, nonce: bytes, rank: int, timeout: float) -> Connection:
    """Connect a rank to its engine, which awaits `steps_of(rank)` at `address` ("host:port").

    Raises:
        TimeoutError: the engine could not be reached within `timeout` seconds. The message says why.
    """
    try:
        return _reach(address, nonce, steps_of(rank), time.monotonic() + timeout)
    except TimeoutError as error:
        raise TimeoutError(f"rank {rank} cannot connect to its engine within {timeout:g} s: {error}") from None


class Arrivals:
    """Awaits one connection for each of some purposes, in a thread of its own."""

    def __init__(self, address: str, secret: bytes, purposes: Collection[str]) -> None:
        """Listen on the IP address `address`, until there is a connection for each purpose.

        Raises:
            OSError: this host does not have the address.
        """
        self._num_awaited = len(purposes)
        self._found: dict[str, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(self._selector, address, 0, secret, frozenset(purposes).__contains__, self._take)
        self.port = self._listener.port
        self.address = f"{address}:{self.port}"
        """Where to connect: "host:port"."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def finish(self, deadline: float) -> dict[str, Connection]:
        """Wait for all connections, but not beyond `deadline`; stop listening, and return what has come."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._stopped.set()
        self._thread.join()
        return self._found

    def _serve(self) -> None:
        while len(self._found) < self._num_awaited and not self._stopped.is_set():
            run_callbacks(self._selector, 0.05)
            self._listener.drop_silent()
        self._listener.close()
        self._selector.close()

    def _take(self, purpose: str, connection: Connection) -> None:
        if (former := self._found.pop(purpose, None)) is not None:
            former.socket.close()  # the other end gave this one up, and connected again
        self._found[purpose] = connection


def _meet(meeting: Meeting, peer: int, purpose: str, deadline: float, problems: dict[int, str]) -> Connection | None:
    """A connection to a lower rank. None: there is none in time, and `problems` says why."""
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


def _reach(address: str, nonce: bytes, purpose: str, deadline: float) -> Connection:
    """A connection to a listener; tries again until `deadline`.

    Raises:
        TimeoutError: there is none in time. The message says why the last try failed.
    """
    host, _, port = address.rpartition(":")
    problem = f"{address}: there was no time left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return connect(host, int(port), nonce, purpose, left)
        except HandshakeRefused as error:
            problem = f"{address} refused the connection: {error}"
        except OSError as error:
            problem = f"{address}: {error.strerror or error}"
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError(problem)
