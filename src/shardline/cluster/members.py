"""The nodes that a head knows, and the rules by which it accepts one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardline.cluster.wire import FrameSocket, send
from shardline.messages.node import Join, StartHead

_log = logging.getLogger(__name__)


@dataclass
class Member:
    peer: FrameSocket
    """Its connection."""
    join: Join
    heard: float = field(default_factory=time.monotonic)
    """When the last message of it came."""
    answered: float = field(default_factory=time.monotonic)
    """When the head sent the last beat that the node has answered."""

    @property
    def name(self) -> str:
        """The node for messages."""
        return f"node {self.join.node} ({self.join.host.name}, {self.join.host.address})"

    def send(self, message: object) -> None:
        send(self.peer, message)


class Members:
    """The nodes of a cluster. The deployment's hosts are the head, and then the nodes in the order of their numbers."""

    def __init__(self, start: StartHead) -> None:
        self._start = start
        self._members: dict[int, Member] = {}
        self._order: tuple[int, ...] = ()
        """The numbers of the nodes once all have joined; later starts keep it."""

    def find(self, peer: FrameSocket) -> Member | None:
        """The node with this connection; None: it has not joined, or it is lost."""
        return next((member for member in self._members.values() if member.peer is peer), None)

    def of_node(self, node: int) -> Member | None:
        return self._members.get(node)

    def present(self) -> list[Member]:
        """The nodes that are there now, in the order of their numbers."""
        return [self._members[node] for node in sorted(self._members)]

    def at_index(self, host: int) -> Member | None:
        """The node with an index among the deployment's hosts; None: it is away."""
        return self._members.get(self._order[host - 1]) if 0 < host <= len(self._order) else None

    def host_of(self, member: Member) -> int:
        """The node's index among the deployment's hosts; 0 before all have joined."""
        node = member.join.node
        return self._order.index(node) + 1 if node in self._order else 0

    def add(self, peer: FrameSocket, join: Join) -> Member:
        """Take up a node that has joined over a connection.

        Raises:
            ValueError: it does not fit the cluster; the message says why, and what would.
        """
        self._check_place(join)
        self._check_likeness(join)
        member = self._members[join.node] = Member(peer, join)
        return member

    def kernel_path(self, member: Member) -> str:
        """The CPU kernel path of a node: the head's, or if it lacks that (`--numerics fast`), its own best one."""
        isa = self._start.own.host.devices[0].capability
        return isa if isa in member.join.isas else member.join.isas[-1]

    def remove(self, member: Member) -> None:
        self._members.pop(member.join.node, None)

    def missing(self) -> str:
        """The nodes that are awaited, in words; empty: all are there."""
        if self._order:
            absent = [str(node) for node in self._order if node not in self._members]
        elif self._start.num_replicas:
            covered = self._start.own.host.num_replicas + sum(m.join.host.num_replicas for m in self.present())
            left = self._start.num_replicas - covered
            return (
                f"nodes for {left} of {self._start.num_replicas} replicas (--data-parallel-size-local)" if left else ""
            )
        else:
            absent = [str(node) for node in self._start.nodes if node not in self._members]
        return f"node{'s' * (len(absent) > 1)} {', '.join(absent)} (--node-rank)" if absent else ""

    def settle(self) -> tuple[Join, ...]:
        """All nodes are there: fix which host of the deployment each of them is, and return what they are."""
        self._order = self._order or tuple(sorted(self._members))
        return tuple(self._members[node].join for node in self._order)

    def _check_place(self, join: Join) -> None:
        start = self._start
        if (taken := self._members.get(join.node)) is not None:
            raise ValueError(f"--node-rank {join.node} is taken by {taken.join.host.name} ({taken.join.host.address})")
        if self._order:
            if join.node not in self._order:
                raise ValueError(f"node {join.node} does not belong to this cluster, which runs on {self._order}")
            return
        if not start.num_replicas:
            if join.node not in start.nodes:
                raise ValueError(f"--node-rank {join.node} is not one of this cluster's; free are {start.nodes}")
            return
        first, count = join.node, join.host.num_replicas
        if count < 1 or first + count > start.num_replicas:
            raise ValueError(
                f"replicas {first} to {first + count - 1} are not all among the {start.num_replicas} of this cluster"
            )
        for other in (start.own, *(member.join for member in self.present())):
            begin, end = other.node, other.node + other.host.num_replicas
            if first < end and begin < first + count:
                raise ValueError(
                    f"replicas {first} to {first + count - 1} overlap with those of {other.host.name}, "
                    f"{begin} to {end - 1}; set --data-parallel-start-rank and --data-parallel-size-local"
                )

    def _check_likeness(self, join: Join) -> None:
        own = self._start.own
        difference = name_difference(own.software, join.host.name, join.software) or name_difference(
            own.flags, join.host.name, join.flags, prefix="--"
        )
        if difference:
            raise ValueError(difference)
        if join.model.config_text != own.model.config_text or join.weights_digest != own.weights_digest:
            raise ValueError(
                f"the models differ: {own.model.folder} on the head and {join.model.folder} on {join.host.name} have "
                "the same name but not the same config.json or weights; copy one over the other"
            )
        for difference in name_unlike_devices(own, join):
            if own.flags["numerics"] == "exact":
                raise ValueError(difference)
            _log.warning("%s; --numerics fast takes them as they are", difference)


def name_unlike_devices(head: Join, node: Join) -> Iterator[str]:
    """Each reason why a node's devices give other bits than the head's, with what mends it."""
    isa = head.host.devices[0].capability
    if isa not in node.isas:
        both = [name for name in node.isas if name in head.isas]
        yield (
            f"{head.host.name} computes with {isa}, and {node.host.name} has {', '.join(node.isas)}: set "
            f"SHARDLINE_ISA={both[-1] if both else 'portable'} on the head"
        )
    mine, other = head.host.gpu_architectures, node.host.gpu_architectures
    if mine and other and mine != other:
        yield f"{head.host.name} has GPUs of {', '.join(mine)}, {node.host.name} of {', '.join(other)}; use one kind"


def name_difference(ours: Mapping[str, str], node: str, theirs: Mapping[str, str], prefix: str = "") -> str:
    """The first value that differs between the head and a node, with both values; empty: all are equal."""
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name != "shardline", name)):
        mine, its = ours.get(name, "none"), theirs.get(name, "none")
        if mine != its:
            return f"{prefix}{name} differs: the head has {mine}, {node} {its}"
    return ""
