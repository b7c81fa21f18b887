"""Replicas whose loads a router sees: they advance together, here or in another process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec

from shardline.planner.simulation.processes import Channel, Worker
from shardline.planner.simulation.replica import Outcome, ReplicaSetup, SimulatedReplica
from shardline.planner.simulation.workload import SimulatedRequest


class Routed(NamedTuple):
    """A request and the replica that runs it."""

    replica: int
    number: int
    """How many requests came before it."""
    request: SimulatedRequest


class Report(NamedTuple):
    """The load of a replica."""

    replica: int
    num_requests: int
    num_tokens: int


class Group(Protocol):
    """Some of the replicas."""

    def begin_window(self, routed: list[Routed], until: float) -> None:
        """Give the replicas requests, and run them until a time; infinity: to their end."""

    def take_reports(self) -> list[Report]:
        """The loads at the end of the window, of replicas whose load can have changed."""

    def outcomes(self) -> Iterator[Outcome]:
        """What became of all requests, one replica after the other, once all have arrived."""


class LocalGroup:
    """Replicas `first`, `first` + `stride`, and so on, in this process."""

    def __init__(self, setup: ReplicaSetup, bucket: float, first: int, num_replicas: int, stride: int) -> None:
        self._replicas = {index: SimulatedReplica(setup, bucket) for index in range(first, num_replicas, stride)}
        self._busy: set[int] = set()
        self._reports: list[Report] = []

    def begin_window(self, routed: list[Routed], until: float) -> None:
        """See `Group`."""
        for one in routed:
            self._replicas[one.replica].add(one.number, one.request)
            self._busy.add(one.replica)
        self._reports = []
        if math.isinf(until):
            return  # `outcomes` runs one replica after the other
        for index in sorted(self._busy):
            replica = self._replicas[index]
            replica.advance(until)
            report = Report(index, *replica.load)
            self._reports.append(report)
            if not report.num_requests:
                self._busy.remove(index)

    def take_reports(self) -> list[Report]:
        """See `Group`."""
        return self._reports

    def outcomes(self) -> Iterator[Outcome]:
        """See `Group`."""
        while self._replicas:
            replica = self._replicas.pop(next(iter(self._replicas)))
            replica.advance()
            yield replica.outcome()


class _Window(NamedTuple):
    routed: list[Routed]
    until: float


class RemoteGroup:
    """A `LocalGroup` in a process of its own, which works while this one goes on."""

    def __init__(self, setup: ReplicaSetup, bucket: float, first: int, num_replicas: int, stride: int) -> None:
        self._size = len(range(first, num_replicas, stride))
        self.worker = Worker(lambda channel: _serve(channel, LocalGroup(setup, bucket, first, num_replicas, stride)))
        self._reports = msgspec.msgpack.Decoder(list[Report])

    def begin_window(self, routed: list[Routed], until: float) -> None:
        """See `Group`."""
        self.worker.send(msgspec.msgpack.encode(_Window(routed, until)))

    def take_reports(self) -> list[Report]:
        """See `Group`."""
        return self._reports.decode(self.worker.receive())

    def outcomes(self) -> Iterator[Outcome]:
        """See `Group`."""
        for _ in range(self._size):
            yield msgspec.msgpack.decode(self.worker.receive(), type=Outcome)


def _serve(channel: Channel, group: LocalGroup) -> None:
    """Do in the other process what messages ask for, until the last window."""
    decoder = msgspec.msgpack.Decoder(_Window)
    while (message := channel.receive()) is not None:
        window = decoder.decode(message)
        group.begin_window(window.routed, window.until)
        if math.isinf(window.until):
            for outcome in group.outcomes():
                channel.send(msgspec.msgpack.encode(outcome))
            return
        channel.send(msgspec.msgpack.encode(group.take_reports()))
