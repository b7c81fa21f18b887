"""Replicas whose loads a router sees: they advance together, here or in another process."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import msgspec

from shardline.planner.simulation.replica import Outcome, ReplicaSetup, SimulatedReplica
from shardline.planner.simulation.workload import SimulatedRequest

_FAILED = "a process of the simulation has failed"


class Worker:
    """A forked process that runs a function with its end of a connection."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(work, theirs, self._connection), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            RuntimeError: the process failed; it has written its traceback.
        """
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise RuntimeError(_FAILED) from None

    def receive(self) -> bytes:
        """The next message.

        Raises:
            RuntimeError: the process failed; it has written its traceback.
        """
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise RuntimeError(_FAILED) from None

    def close(self) -> None:
        """Close the connection; a process that still works ends when it next uses it."""
        self._connection.close()

    def join(self) -> None:
        """Wait for the end of the process. `close` all workers first: a later one has copies of earlier connections."""
        self._process.join()


def _run(work: Callable[[Connection], None], connection: Connection, parents: Connection) -> None:
    """Run the child until its parent closes the connection, which it alone may then hold."""
    parents.close()
    # The simulation makes no cycles, and looking for them takes a tenth of its time.
    gc.disable()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        work(connection)


class Routed(NamedTuple):
    """A request and the replica that runs it."""

    replica: int
    number: int
    """How many requests came before it."""
    request: SimulatedRequest
    pending_chunks: int


class Report(NamedTuple):
    replica: int
    num_requests: int
    num_tokens: int
    pending_chunks: int


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
        for index, number, request, pending_chunks in routed:
            self._replicas[index].add(number, request, pending_chunks)
            self._busy.add(index)
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
        return self._reports

    def outcomes(self) -> Iterator[Outcome]:
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
        self.worker = Worker(lambda theirs: _serve(theirs, LocalGroup(setup, bucket, first, num_replicas, stride)))
        self._reports = msgspec.msgpack.Decoder(list[Report])

    def begin_window(self, routed: list[Routed], until: float) -> None:
        self.worker.send(msgspec.msgpack.encode(_Window(routed, until)))

    def take_reports(self) -> list[Report]:
        return self._reports.decode(self.worker.receive())

    def outcomes(self) -> Iterator[Outcome]:
        for _ in range(self._size):
            yield msgspec.msgpack.decode(self.worker.receive(), type=Outcome)


def _serve(connection: Connection, group: LocalGroup) -> None:
    """Do in the other process what messages ask for, until the last window."""
    decoder = msgspec.msgpack.Decoder(_Window)
    while True:
        window = decoder.decode(connection.recv_bytes())
        group.begin_window(window.routed, window.until)
        if math.isinf(window.until):
            for outcome in group.outcomes():
                connection.send_bytes(msgspec.msgpack.encode(outcome))
            return
        connection.send_bytes(msgspec.msgpack.encode(group.take_reports()))


@contextlib.contextmanager
def replica_groups(setup: ReplicaSetup, bucket: float, num_replicas: int, processes: int) -> Iterator[list[Group]]:
    """All replicas, in so many other processes; 1: in this one. Replica r is in group r modulo their number."""
    if processes == 1:
        yield [LocalGroup(setup, bucket, 0, num_replicas, 1)]
        return
    groups: list[RemoteGroup] = []
    try:
        for first in range(processes):
            groups.append(RemoteGroup(setup, bucket, first, num_replicas, processes))
        yield [*groups]
    finally:
        for group in groups:
            group.worker.close()
        for group in groups:
            group.worker.join()
