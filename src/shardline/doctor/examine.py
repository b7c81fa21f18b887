"""The doctor's visit: one node alone, or a head that questions its nodes over the control channel and their links."""

from __future__ import annotations

import itertools
import secrets
import selectors
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from shardline.cluster.links import answer
from shardline.cluster.wire import FrameSocket, HeadSocket, connect_to_head, find_token, send
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.doctor.checks import check_cluster, check_deployment, check_node
from shardline.doctor.facts import Finding, Link, NodeFacts, Report
from shardline.doctor.gather import gather
from shardline.handshake import HandshakeRefused, run_callbacks
from shardline.messages.node import Connect, Listen, Listening, Measured, Refused, Rejoin

_LINKS_SECONDS = 7.0
"""Seconds in which links are measured once all nodes are there."""
_SEND_SECONDS = 0.4
_ANSWER_SECONDS = 4.0
_NUM_PINGS = 5


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first message."""

    facts: NodeFacts


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Head to node: what is the time?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Node to head."""

    time: float
    """Seconds since 1970, by the node's clock."""


Command = Ping | Listen | Connect
FromHead = Ping | Listen | Connect | Refused | Rejoin | Report
"""A head that serves answers with Rejoin: it does not know the doctor's messages."""
FromNode = Hello | Pong | Listening | Measured


def examine(config: EngineConfig, server: ServerConfig, wait: float) -> Report:
    """Examine this node, or the cluster to which it belongs. `wait`: seconds to wait for other nodes.

    Raises:
        ValueError: there is no join token, or the head refuses this node.
    """
    facts = gather(config, server)
    alone = Report(tuple(check_node(facts)), (facts,))
    cluster = config.cluster
    if not cluster.has_nodes:
        return _with(alone, *check_deployment(config, [facts]))
    if facts.address_error:
        return alone
    token = find_token(cluster)
    if cluster.is_headless:
        return _visit_head(token, config, facts, alone, wait)
    if any(port.error and port.flag != "--port" for port in facts.ports):
        return alone  # the head's port is taken, perhaps by the server itself
    return Reception(token, config, facts).receive(wait)


class Reception:
    def __init__(self, token: str, config: EngineConfig, own: NodeFacts) -> None:
        """Listen for nodes.

        Raises:
            ValueError: the port cannot be used.
        """
        self._config = config
        self._own = own
        self._num_replicas = config.parallel.data_parallel_size
        self._nodes: dict[int, tuple[FrameSocket, NodeFacts]] = {}
        self._lost: set[int] = set()
        self._decoder: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
        self._received: deque[tuple[FrameSocket, bytes]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wire = HeadSocket(
            token,
            own.host.address,
            config.cluster.head_port,
            self._selector,
            lambda peer, body: self._received.append((peer, body)),
            self._note_end,
        )

    def receive(self, wait: float) -> Report:
        """Wait for all nodes, examine them and their links, and tell them the report."""
        try:
            deadline = time.monotonic() + wait
            while self._missing() and time.monotonic() < deadline:
                self._next_message(deadline)
            links = self._measure_links()
            clocks = {node: self._clock_skew(node) for node in self._nodes if node not in self._lost}
            nodes = (self._own, *(facts for _, (_, facts) in sorted(self._nodes.items())))
            findings = [finding for facts in nodes for finding in check_node(facts)]
            if missing := self._missing():
                findings.append(_absence(self._own, missing, wait))
            else:
                findings += check_deployment(self._config, nodes)
            findings += [_silence(self._nodes[node][1]) for node in sorted(self._lost)]
            report = Report((*findings, *check_cluster(nodes, links, clocks)), nodes, tuple(links))
            for peer, _ in self._nodes.values():
                send(peer, report)
            return report
        finally:
            self._wire.close()
            self._selector.close()

    def _missing(self) -> str:
        """The nodes that are awaited, in words; empty: all are there."""
        if self._own.num_nodes:
            absent = [str(node) for node in range(1, self._own.num_nodes) if node not in self._nodes]
            return f"--node-rank {', '.join(absent)}" if absent else ""
        there = [self._own, *(facts for _, facts in self._nodes.values())]
        left = self._num_replicas - sum(facts.host.num_replicas for facts in there)
        return f"nodes for {left} of {self._num_replicas} replicas (--data-parallel-size-local)" if left > 0 else ""

    def _next_message(self, deadline: float) -> tuple[FrameSocket, FromNode] | None:
        """The next message of a node; None: there is none yet. New nodes are taken up."""
        if not self._received:
            self._wire.check()
            run_callbacks(self._selector, max(0.001, min(0.2, deadline - time.monotonic())))
        if not self._received:
            return None
        peer, body = self._received.popleft()
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError:  # of a node that serves, or of another version
            return None
        if isinstance(message, Hello):
            self._admit(peer, message.facts)
            return None
        return peer, message

    def _note_end(self, peer: FrameSocket) -> None:
        self._lost.update(node for node, (other, _) in self._nodes.items() if other is peer)

    def _admit(self, peer: FrameSocket, facts: NodeFacts) -> None:
        node = facts.node
        known = self._nodes.get(node)
        if known is not None or node == self._own.node:
            name = (known[1] if known else self._own).name
            send(peer, Refused(f"--node-rank {node} is taken by {name}"))
        elif self._own.num_nodes and not 0 < node < self._own.num_nodes:
            send(peer, Refused(f"--node-rank {node} is not below --nnodes {self._own.num_nodes} of the head"))
        else:
            self._nodes[node] = peer, facts

    def _measure_links(self) -> list[Link]:
        """Both directions between the head and each node, and between neighbours."""
        order = [self._own.node, *sorted(self._nodes)]
        pairs = {(order[0], node) for node in order[1:]} | set(itertools.pairwise(order))
        directions = [way for one, other in sorted(pairs) for way in ((one, other), (other, one))]
        seconds = min(_SEND_SECONDS, 0.5 * _LINKS_SECONDS / max(1, len(directions)))
        deadline, links = time.monotonic() + _LINKS_SECONDS, []
        for source, target in directions:
            if time.monotonic() < deadline and not {source, target} & self._lost:
                links.append(self._measure(source, target, seconds))
        return links

    def _measure(self, source: int, target: int, seconds: float) -> Link:
        key = secrets.token_bytes(16)
        place = self._ask(target, Listen(key))
        if isinstance(place, Listening):
            address = self._facts(target).host.address
            place = self._ask(source, Connect(address, place.port, key, seconds))
        if isinstance(place, Measured):
            return Link(source, target, place.latency, place.bytes_per_second, place.error)
        return Link(source, target, error="a node does not answer")

    def _clock_skew(self, node: int) -> float:
        """Seconds by which a node's clock is ahead, from the fastest of a few questions."""
        best, skew = float("inf"), 0.0
        for _ in range(_NUM_PINGS):
            begin = time.time()
            pong = self._ask(node, Ping())
            trip = time.time() - begin
            if isinstance(pong, Pong) and trip < best:
                best, skew = trip, pong.time - begin - trip / 2
        return skew

    def _ask(self, node: int, command: Command) -> FromNode | None:
        """A node's answer; None: it does not answer, and is not asked again."""
        if node == self._own.node:
            return _answer(command, self._own.host.address)
        if node in self._lost:
            return None
        peer = self._nodes[node][0]
        send(peer, command)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while node not in self._lost and time.monotonic() < deadline:
            found = self._next_message(deadline)
            if found is not None and found[0] is peer:
                return found[1]
        self._lost.add(node)
        return None

    def _facts(self, node: int) -> NodeFacts:
        return self._own if node == self._own.node else self._nodes[node][1]


def _visit_head(token: str, config: EngineConfig, facts: NodeFacts, alone: Report, wait: float) -> Report:
    """A node's side: say what it is, do what the head asks for, and return the head's report."""
    address, port = config.cluster.head_address, config.cluster.head_port
    place = f"{address} port {port}"
    decoder: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)
    deadline = time.monotonic() + wait
    try:
        wire = connect_to_head(token, address, port, lambda: time.monotonic() < deadline)
    except HandshakeRefused:
        text = f"{place} refuses the handshake: the join tokens differ, or another program listens there"
        return _with(alone, Finding(facts.name, "head", "broken", text, "copy the head's token to this node"))
    try:
        if wire is not None:
            wire.send(Hello(facts))
        while wire is not None and not wire.has_ended and time.monotonic() < deadline:
            if (body := wire.receive(deadline - time.monotonic())) is None:
                continue
            try:
                message = decoder.decode(body)
            except msgspec.MsgspecError:
                text = f"the head at {place} speaks another version of the protocol"
                fix = "install the same version of Shardline on all nodes"
                return _with(alone, Finding(facts.name, "head", "broken", text, fix))
            if isinstance(message, Report):
                return message
            if isinstance(message, Refused):
                raise ValueError(f"the head refuses this node: {message.message}")
            if isinstance(message, Rejoin):
                text = f"a server runs at {place}, so links were not measured"
                return _with(alone, Finding(facts.name, "head", "ok", text))
            wire.send(_answer(message, facts.host.address))
            deadline = time.monotonic() + 2 * _LINKS_SECONDS
        text = f"no head answers at {place} within {wait:g} s"
        fix = f"start `shardline doctor` with the same flags there, and open port {port}; check --master-addr"
        return _with(alone, Finding(facts.name, "head", "broken", text, fix))
    finally:
        if wire is not None:
            wire.close()


def _answer(command: Command, address: str) -> Pong | Listening | Measured:
    return Pong(time.time()) if isinstance(command, Ping) else answer(command, address)


def _with(report: Report, *findings: Finding) -> Report:
    return msgspec.structs.replace(report, findings=(*report.findings, *findings))


def _absence(own: NodeFacts, missing: str, wait: float) -> Finding:
    text = f"{missing} did not come within {wait:g} s"
    ports: Iterable[str] = (str(port.number) for port in own.ports if port.flag != "--port")
    fix = f"start `shardline doctor` with the same flags there, and open port {', '.join(ports)} on this node"
    return Finding(own.name, "nodes", "broken", text, fix)


def _silence(facts: NodeFacts) -> Finding:
    text = "it came, and then did not answer any more"
    return Finding(facts.name, "control channel", "broken", text, "look at its output; check the network for losses")
