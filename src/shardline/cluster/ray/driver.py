"""The Ray driver process of a front: has Ray place node processes, and places them anew when their nodes are lost.

It is a process of its own, because Ray ends its driver when the Ray cluster ends.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from dataclasses import dataclass

import msgspec

from shardline import env
from shardline.channel import Channel, encode_message, readable
from shardline.cluster.ray.cluster import RayCluster, Reservation, Unreachable
from shardline.cluster.ray.placing import config_of_node, demand_of, find_host, share_groups
from shardline.log import configure_logging
from shardline.messages.node import DriverFailed, FrontToDriver, NodesPresent, Placed, StartDriver, StartNode
from shardline.process_title import set_process_title
from shardline.segment.pulse import start_pulse

_LOOK_SECONDS = 2.0
"""Seconds between two looks at a node that is away."""
_AWAY_SECONDS = 12.0
"""Seconds after which a node whose process runs, but which has left its head, is started again."""
_NOTICE_SECONDS = 30.0

_log = logging.getLogger(__name__)


@dataclass
class _Node:
    """One node of the cluster, wherever it runs at present."""

    number: int
    num_groups: int
    reservation: Reservation | None = None
    left: float | None = None
    """When it left its head; None: it is there, or it has not joined yet."""
    has_joined: bool = False
    """Whether its process has joined the head since it was started."""
    next_look: float = 0.0
    next_notice: float = 0.0


class Driver:
    """Places the nodes of one launch, and looks after those that are away."""

    def __init__(self, cluster: RayCluster, start: StartDriver) -> None:
        self._cluster = cluster
        self._start = start
        self._demand = demand_of(start.config, cluster.hosts())
        self._own: Reservation | None = None
        self._nodes: list[_Node] = []
        self._address = ""

    def place(self) -> Placed:
        """Reserve everything, and start the node processes of the other hosts.

        Raises:
            ValueError: there is no room in the Ray cluster.
            Unreachable: a host does not answer.
        """
        hosts, groups = self._cluster.hosts(), self._start.groups
        own = next(host for host in hosts if host.node_id == self._cluster.own_id)
        # Nodes connect to the address that the user gave this host, if any.
        self._address = env.host_address() or own.address
        if groups:
            # An earlier driver has ended, and its nodes with it; `tend` finds places for them.
            if groups[0]:
                self._own = self._cluster.reserve(own, self._demand, groups[0])
            self._nodes = [_Node(number, count) for number, count in enumerate(groups) if number]
        else:
            shares = share_groups(self._demand, hosts, self._cluster.own_id)
            others = [share for share in shares if share.host.node_id != own.node_id]
            own_groups = self._demand.num_groups - sum(share.num_groups for share in others)
            if own_groups:
                self._own = self._cluster.reserve(own, self._demand, own_groups)
            self._nodes = [_Node(number, share.num_groups) for number, share in enumerate(others, 1)]
            for node, share in zip(self._nodes, others, strict=True):
                node.reservation = self._cluster.reserve(share.host, self._demand, share.num_groups)
                self._start_process(node)
            groups = (own_groups, *(share.num_groups for share in others))
        gpus = None if self._own is None else self._own.gpus()
        return Placed(self._address, groups, self._demand.group_size, gpus)

    def note_present(self, hosts: tuple[int, ...]) -> None:
        """The front says which nodes are joined to the head."""
        for node in self._nodes:
            if node.number in hosts:
                node.left, node.has_joined = None, True
            elif node.has_joined and node.left is None:
                node.left = time.monotonic()

    def tend(self) -> DriverFailed | None:
        """Look after the nodes that are away. A node that fails before it has ever joined ends the launch."""
        now = time.monotonic()
        for node in self._nodes:
            is_there = node.has_joined and node.left is None
            if is_there or now < node.next_look:
                continue
            node.next_look = now + _LOOK_SECONDS
            try:
                if failed := self._look_after(node, now):
                    return failed
            except Unreachable as error:
                _log.warning("node %d: %s", node.number, error)
                self._place_anew(node)
        return None

    def close(self) -> None:
        for node in self._nodes:
            if node.reservation is not None:
                node.reservation.release()
        if self._own is not None:
            self._own.release()
        self._cluster.close()

    def _look_after(self, node: _Node, now: float) -> DriverFailed | None:
        if node.reservation is None:
            self._place_anew(node)
            return None
        end = node.reservation.find_node_end()
        address = node.reservation.host.address
        if end is None:
            if node.left is not None and now - node.left > _AWAY_SECONDS:
                _log.warning("node %d on %s runs, but does not come back; it is started again", node.number, address)
                self._start_process(node)
            return None
        code, words = end
        ended = f"node {node.number} on {address} has ended with code {code}"
        if node.left is None and not self._start.groups:
            return DriverFailed(f"{ended}: {words.removeprefix('shardline: error: ')}", user_error=code == 2)
        _log.warning("%s (%s); it is started again", ended, words)
        self._start_process(node)
        return None

    def _place_anew(self, node: _Node) -> None:
        """Find another host for a node that is lost."""
        former, node.reservation = node.reservation, None
        avoided = set()
        if former is not None:
            avoided.add(former.host.node_id)
            former.release()
        try:
            host = find_host(self._demand, node.num_groups, self._cluster.hosts(), frozenset(avoided))
            if host is not None:
                node.reservation = self._cluster.reserve(host, self._demand, node.num_groups)
                self._start_process(node)
                _log.info("node %d is placed on %s", node.number, host.address)
                return
            why = f"Ray has no other host with {node.num_groups * self._demand.amount} free {self._demand.resource}s"
        except Unreachable as error:
            why = str(error)
        if (now := time.monotonic()) >= node.next_notice:
            node.next_notice = now + _NOTICE_SECONDS
            _log.warning("node %d has no place yet: %s", node.number, why)

    def _start_process(self, node: _Node) -> None:
        assert node.reservation is not None
        config = config_of_node(self._start.config, node.number, len(self._nodes) + 1, self._address)
        message = encode_message(StartNode(config, self._start.token, env.settings_for_nodes()))
        node.reservation.start_node(message)
        if node.left is not None:
            node.left = time.monotonic()


def main() -> None:
    """Entry point; the arguments are descriptors: of the front's channel, and of the pulse."""
    channel_fd, pulse = map(int, sys.argv[1:])
    start_pulse(pulse)
    configure_logging()
    set_process_title("ray")
    channel: Channel[FrontToDriver] = Channel(socket.socket(fileno=channel_fd), FrontToDriver)  # type: ignore[arg-type]
    try:
        start = channel.receive()
        assert isinstance(start, StartDriver)
        cluster = RayCluster()
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
        ):  # the front says when to end; Ray has set handlers
            signal.signal(number, signal.SIG_IGN)
        driver = Driver(cluster, start)
        try:
            channel.send(driver.place())
            _serve(channel, driver)
        finally:
            driver.close()
    except (ValueError, Unreachable) as error:
        channel.send(DriverFailed(str(error), user_error=isinstance(error, ValueError)))
        readable([channel.fileno()], 5.0)


def _serve(channel: Channel[FrontToDriver], driver: Driver) -> None:
    """Serve until the front ends."""
    while True:
        if readable([channel.fileno()], 0.5):
            try:
                message = channel.receive()
            except (EOFError, OSError, msgspec.MsgspecError):
                return
            assert isinstance(message, NodesPresent)
            driver.note_present(message.hosts)
        if failed := driver.tend():
            channel.send(failed)
            return
