"""The links between the hosts of a deployment: they are measured as ranks would see them, one after another."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from shardline.cluster.members import Member, Members
from shardline.config.topology import COORDINATES, GROUPS, Axis
from shardline.deployment.deployment import Deployment
from shardline.handshake import connect
from shardline.messages.node import Connect, LinkMeasured, Listen, Listening, Measured
from shardline.models.communication import TRAFFIC
from shardline.models.partition import Span
from shardline.runtime.parallel.rendezvous import Arrivals

ACCEPT_SECONDS = 4.0
SURVEY_SECONDS = 20.0
"""Links that are not measured by then are left out."""
_PURPOSE = "link"
_CONNECT_SECONDS = 2.0
_PING_SECONDS = 0.1
_SEND_SECONDS = 0.1
_LINK_SECONDS = 5.0
_CHUNK = bytes(1 << 18)
_COUNT = struct.Struct("!Q")

_log = logging.getLogger(__name__)


def answer(command: Listen | Connect, address: str) -> Listening | Measured:
    """Do what the head asks for, on the host with this address. `Connect` takes about `command.seconds` and 0.1 s."""
    try:
        if isinstance(command, Listen):
            return Listening(_listen(address, command.key))
        return _measure(command)
    except OSError as error:
        what = f"{command.address} port {command.port}" if isinstance(command, Connect) else f"listening on {address}"
        return Measured(error=f"{what}: {error.strerror or error}")


def _listen(address: str, key: bytes) -> int:
    """Serve one connection of somebody who knows `key`, in a thread; returns the port."""
    arrivals = Arrivals(address, key, [_PURPOSE])
    threading.Thread(target=_serve, args=(arrivals,), name="link-listen", daemon=True).start()
    return arrivals.port


def _serve(arrivals: Arrivals) -> None:
    for sock, _ in arrivals.finish(time.monotonic() + ACCEPT_SECONDS).values():
        with sock, contextlib.suppress(OSError):
            sock.settimeout(ACCEPT_SECONDS)
            _echo_and_count(sock)


def _echo_and_count(client: socket.socket) -> None:
    """Echo bytes until one is "b"; then count bytes to the end, and answer with their number."""
    while (byte := client.recv(1)) == b"p":
        client.sendall(byte)
    total, buffer = 0, bytearray(len(_CHUNK))
    while count := client.recv_into(buffer):
        total += count
    client.sendall(_COUNT.pack(total))


def _measure(command: Connect) -> Measured:
    """Ping, then send for some time.

    Raises:
        OSError: the connection cannot be made, or it breaks.
    """
    sock, _ = connect(command.address, command.port, command.key, _PURPOSE, _CONNECT_SECONDS)
    with sock:
        sock.settimeout(ACCEPT_SECONDS)
        trips: list[float] = []
        end = time.monotonic() + _PING_SECONDS
        while not trips or (len(trips) < 200 and time.monotonic() < end):
            begin = time.perf_counter()
            sock.sendall(b"p")
            if not sock.recv(1):
                raise OSError("the other host has closed the connection")
            trips.append(time.perf_counter() - begin)
        sock.sendall(b"b")
        begin = time.perf_counter()
        while time.perf_counter() < begin + command.seconds:
            sock.sendall(_CHUNK)
        sock.shutdown(socket.SHUT_WR)
        if len(count := sock.recv(_COUNT.size)) < _COUNT.size:
            raise OSError("the other host has closed the connection")
        (total,) = _COUNT.unpack(count)
        return Measured(statistics.median(trips), total / (time.perf_counter() - begin))


def used_links(deployment: Deployment) -> list[tuple[int, int]]:
    """The pairs of hosts that exchange something: front and engines, and the ranks of an engine."""
    links: set[tuple[int, int]] = set()
    for places in deployment.placements:
        hosts = sorted({place.host for place in places} | {0})
        links.update(itertools.combinations(hosts, 2))
    return sorted(links)


class Survey:
    """The head's part. It asks one node to listen and the other one to connect and to measure."""

    def __init__(self, address: str, members: Members, on_measured: Callable[[LinkMeasured], None]) -> None:
        """`address`: of the head's host."""
        self._address = address
        self._members = members
        self._on_measured = on_measured
        self._waiting: deque[tuple[int, int]] = deque()
        self._link: tuple[int, int] | None = None
        self._key = b""
        self._deadline = self._end = 0.0

    def start(self, deployment: Deployment) -> None:
        """Begin with the links of a deployment."""
        self._waiting = deque(used_links(deployment))
        self._end = time.monotonic() + SURVEY_SECONDS
        self._next_link()

    def handle(self, member: Member, message: Listening | Measured) -> None:
        """Take what a node has answered. Late answers of nodes that are not asked now are ignored."""
        host = self._members.host_of(member)
        if self._link is None or host not in self._link:
            return
        if isinstance(message, Listening):
            self._connect(message.port)
        else:
            self._report(message)
            self._next_link()

    def check(self, now: float) -> None:
        """Give up a link whose hosts do not answer. Call this every second."""
        if self._link is not None and now >= self._deadline:
            self._on_measured(LinkMeasured(self._link, Measured(error="a node does not answer")))
            self._next_link()

    def _report(self, measured: Measured) -> None:
        assert self._link is not None
        ends = [self._members.at_index(host) for host in self._link]
        first, second = ("the head" if end is None else end.name for end in ends)
        if measured.error and all(end or host == 0 for end, host in zip(ends, self._link, strict=True)):
            _log.error(
                "%s cannot reach %s: %s; give both an address on the network that joins the nodes (SHARDLINE_HOST_IP), "
                "and let firewalls admit the nodes",
                second,
                first,
                measured.error,
            )
        self._on_measured(LinkMeasured(self._link, measured))

    def _next_link(self) -> None:
        """Have the first host of the next link listen."""
        self._link = None
        while self._waiting and self._link is None and time.monotonic() < self._end:
            self._link = self._waiting.popleft()
            self._key, self._deadline = secrets.token_bytes(16), time.monotonic() + _LINK_SECONDS
            first, command = self._link[0], Listen(self._key)
            if first == 0:
                listening = answer(command, self._address)
                if isinstance(listening, Listening):
                    self._connect(listening.port)
                else:
                    self._link = None
            elif (member := self._members.at_index(first)) is not None:
                member.send(command)
            else:
                self._link = None

    def _connect(self, port: int) -> None:
        """Have the second host of the link measure it."""
        assert self._link is not None
        first, second = (self._members.at_index(host) for host in self._link)
        if second is not None:
            address = self._address if first is None else first.join.host.address
            second.send(Connect(address, port, self._key, _SEND_SECONDS))


def describe_links(deployment: Deployment, links: dict[tuple[int, int], Measured]) -> list[str]:
    """Lines for people: a link each, and what each axis costs whose ranks exchange across hosts."""
    hosts, grid = deployment.machine.hosts, deployment.grid
    lines = []
    for (first, second), measured in sorted(links.items()):
        ends = f"link {hosts[first].name} ({hosts[first].address}) - {hosts[second].name} ({hosts[second].address}): "
        rate = (
            f"{measured.latency * 1e6:,.0f} µs a round trip, "
            f"{measured.bytes_per_second * 8e-9:.2f} Gb/s over one connection"
        )
        lines.append(ends + (f"not measured: {measured.error}" if measured.error else rate))
    layers = Span(0, len(deployment.spec.layers))
    for axis, along in GROUPS.items():
        ranks = grid.num_exchanging(axis)
        count = TRAFFIC[axis](deployment.spec, layers, ranks, grid.data, deployment.numerics).num_messages
        latency = max((links[pair].latency for pair in _axis_links(deployment, axis) if pair in links), default=0.0)
        if count and latency:
            inside = " and ".join(f"-{COORDINATES[name]}" for name in along if getattr(grid, name) > 1)
            across = " or ".join(f"-{COORDINATES[name]}" for name in ("pipeline", "data") if name not in along)
            lines.append(
                f"{axis} parallelism crosses nodes: {count} exchanges a token, each at least half a round trip "
                f"({latency * 5e5:,.0f} µs), add {count * latency * 500:.1f} ms to every token; keep {inside} inside "
                f"a node, and use {across} across"
            )
    return lines


def _axis_links(deployment: Deployment, axis: Axis) -> set[tuple[int, int]]:
    """The pairs of hosts between which the groups of an axis exchange."""
    groups = {deployment.grid.place(rank).peers(axis) for rank in range(deployment.grid.world_size)}
    pairs: set[tuple[int, int]] = set()
    for places in deployment.placements:
        for group in groups:
            pairs.update(itertools.combinations(sorted({places[rank].host for rank in group}), 2))
    return pairs
