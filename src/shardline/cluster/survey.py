"""Measures the links between the hosts of a deployment while ranks load, one link after another."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable

from shardline.cluster.links import answer
from shardline.cluster.members import Member, Members
from shardline.cluster.wire import HeadSocket
from shardline.deployment.deployment import Deployment
from shardline.messages.node import Connect, LinkMeasured, Listen, Listening, Measured
from shardline.models.communication import tensor_traffic
from shardline.models.partition import Span

SURVEY_SECONDS = 20.0
"""Links that are not measured by then are left out."""
_SEND_SECONDS = 0.1
_LINK_SECONDS = 5.0

_log = logging.getLogger(__name__)


def used_links(deployment: Deployment) -> list[tuple[int, int]]:
    """The pairs of hosts that exchange something: front and engines, and the ranks of an engine."""
    links: set[tuple[int, int]] = set()
    for places in deployment.placements:
        hosts = sorted({place.host for place in places} | {0})
        links.update(itertools.combinations(hosts, 2))
    return sorted(links)


class Survey:
    """The head's part. It asks one node to listen and the other one to connect and to measure."""

    def __init__(
        self, address: str, members: Members, wire: HeadSocket, on_measured: Callable[[LinkMeasured], None]
    ) -> None:
        """`address`: of the head's host."""
        self._address = address
        self._members = members
        self._wire = wire
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
        """Pass on what a node has found."""
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
                self._wire.send(member.identity, command)
            else:
                self._link = None

    def _connect(self, port: int) -> None:
        """Have the second host of the link measure it."""
        assert self._link is not None
        first, second = (self._members.at_index(host) for host in self._link)
        if second is not None:
            address = self._address if first is None else first.join.host.address
            self._wire.send(second.identity, Connect(address, port, self._key, _SEND_SECONDS))


def describe_links(deployment: Deployment, links: dict[tuple[int, int], Measured]) -> list[str]:
    """Lines for people: a link each, and what tensor parallelism across hosts costs."""
    hosts = deployment.machine.hosts
    lines = []
    for (one, other), found in sorted(links.items()):
        ends = f"link {hosts[one].name} ({hosts[one].address}) - {hosts[other].name} ({hosts[other].address}): "
        rate = (
            f"{found.latency * 1e6:,.0f} µs a round trip, {found.bytes_per_second * 8e-9:.2f} Gb/s over one connection"
        )
        lines.append(ends + (f"not measured: {found.error}" if found.error else rate))
    latency = max((links[pair].latency for pair in _tensor_links(deployment) if pair in links), default=0.0)
    if latency:
        layers = Span(0, len(deployment.spec.layers))
        count = tensor_traffic(deployment.spec, layers, deployment.grid.tensor, 1, deployment.numerics).num_messages
        lines.append(
            f"tensor parallelism crosses nodes: {count} exchanges a token, each at least half a round trip "
            f"({latency * 5e5:,.0f} µs), add {count * latency * 500:.1f} ms to every token; keep -tp inside a node, "
            "and use -pp or -dp across"
        )
    return lines


def _tensor_links(deployment: Deployment) -> set[tuple[int, int]]:
    """The pairs of hosts between which a tensor-parallel group exchanges."""
    size = deployment.grid.tensor
    pairs: set[tuple[int, int]] = set()
    for places in deployment.placements:
        for first in range(0, len(places), size):
            hosts = sorted({place.host for place in places[first : first + size]})
            pairs.update(itertools.combinations(hosts, 2))
    return pairs
