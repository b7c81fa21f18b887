"""Replicas whose loads a router sees: they advance together, here or in another process."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import struct
import traceback
from collections.abc import Callable, Iterator
from io import BufferedReader, BufferedWriter
from typing import NamedTuple, Protocol

import msgspec

from shardline.planner.simulation.replica import Outcome, ReplicaSetup, SimulatedReplica
from shardline.planner.simulation.workload import SimulatedRequest

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of a two-way connection. Messages keep their borders."""

    def __init__(self, reader: BufferedReader, writer: BufferedWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: bytes) -> None:
        """Send a message; it arrives at once."""
        self._writer.write(_LENGTH.pack(len(message)) + message)
        self._writer.flush()

    def receive(self) -> bytes | None:
        """The next message; None: the other end is closed."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        return self._reader.read(length)

    def close(self) -> None:
        """Close this end."""
        self._reader.close()
        with contextlib.suppress(BrokenPipeError):  # the other end may have ended before it read everything
            self._writer.close()


class Worker:
    """A forked process that runs a function with its end of a channel."""

    def __init__(self, work: Callable[[Channel], None]) -> None:
        to_child, to_parent = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(to_child[1])
            os.close(to_parent[0])
            _run_and_exit(work, Channel(os.fdopen(to_child[0], "rb"), os.fdopen(to_parent[1], "wb")))
        os.close(to_child[0])
        os.close(to_parent[1])
        self._channel = Channel(os.fdopen(to_parent[0], "rb"), os.fdopen(to_child[1], "wb"))

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            RuntimeError: the process failed; it has written its traceback.
        """
        try:
            self._channel.send(message)
        except BrokenPipeError:
            raise RuntimeError("a process of the simulation has failed") from None

    def receive(self) -> bytes:
        """The next message.

        Raises:
            RuntimeError: the process failed; it has written its traceback.
        """
        message = self._channel.receive()
        if message is None:
            raise RuntimeError("a process of the simulation has failed")
        return message

    def close(self) -> None:
        """Close the channel; a process that still works ends when it next uses it."""
        self._channel.close()

    def join(self) -> None:
        """Wait for the end of the process. `close` all workers first: a later one has copies of earlier channels."""
        os.waitpid(self._process, 0)


def _run_and_exit(work: Callable[[Channel], None], channel: Channel) -> None:
    """Run the child. It must not run the parent's clean-up, so it ends here, whatever happens."""
    code = 1
    try:
        # The simulation makes no cycles, and looking for them takes a tenth of its time.
        gc.disable()
        work(channel)
        code = 0
    except BrokenPipeError:
        code = 0  # the parent wants no more
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def map_in_processes(work: Callable[[int], bytes], count: int, workers: int) -> Iterator[bytes]:
    """The results of `work(0)` to `work(count - 1)`, in order. Process w of `workers` does w, w + workers and so on.

    Raises:
        RuntimeError: a process failed; it has written its traceback.
    """

    def run(first: int, channel: Channel) -> None:
        for index in range(first, count, workers):
            channel.send(work(index))

    children = [Worker(lambda channel, first=first: run(first, channel)) for first in range(workers)]  # type: ignore[misc]
    try:
        for index in range(count):
            yield children[index % workers].receive()
    finally:
        close_all(children)


def close_all(workers: list[Worker]) -> None:
    """Close the channels of all workers, and wait until they have ended."""
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.join()


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
