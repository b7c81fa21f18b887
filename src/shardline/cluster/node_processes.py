"""The engines and ranks that a node runs for its head, and what it tells others about them."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardline.channel import encode_message
from shardline.deployment.deployment import Deployment
from shardline.deployment.segment import segment_layout
from shardline.engine.children import Child, is_own_end
from shardline.engine.start import start_engine
from shardline.messages.engine import EngineBeat, EngineFailed
from shardline.messages.node import ENGINE, Stream
from shardline.messages.worker import RankBeat, RankEnded, RankStarted

_END_SECONDS = 7.0
"""Seconds in which a process may end after its stream has ended; an engine gives its ranks 5."""


@dataclass
class _Segment:
    """The memory that the ranks of an engine map on this host."""

    deployment: Deployment
    engine: int
    host: int
    users: set[Stream] = field(default_factory=set)

    def __post_init__(self) -> None:
        layout = segment_layout(self.deployment, self.engine, self.host)
        self.fd = os.memfd_create("shardline")
        os.ftruncate(self.fd, layout.num_bytes)
        memory = memoryview(mmap.mmap(self.fd, layout.num_bytes))
        self.ranks = layout.ranks
        self.progress = layout.progress(memory)
        self.load = layout.expert_load(memory)


class NodeProcesses:
    """The processes at this node's ends of streams."""

    def __init__(self, host_name: str) -> None:
        self._host_name = host_name
        self._children: dict[Stream, Child] = {}
        self._ending: list[tuple[float, Child]] = []
        self._segments: dict[tuple[int, int], _Segment] = {}

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._children

    def start_engine(self, deployment: Deployment, stream: Stream) -> dict[Stream, socket.socket]:
        """Start an engine; returns the local ends of its own stream and of those to its ranks on other hosts."""
        started = start_engine(deployment, stream.engine, secret=None)
        assert started.child is not None
        self._children[stream] = started.child
        to_ranks = {Stream(stream.engine, rank, stream.start): sock for rank, sock in started.streams.items()}
        return {stream: started.sock, **to_ranks}

    def start_rank(self, deployment: Deployment, stream: Stream) -> tuple[socket.socket, bytes]:
        """Start a rank; returns the local end of its stream, and the first frame for its engine."""
        key = (stream.engine, stream.start)
        host = deployment.placements[stream.engine][stream.rank].host
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = _Segment(deployment, stream.engine, host)
        segment.users.add(stream)
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), segment.fd]
            gpus = deployment.gpus_of(stream.engine, host)
            child = Child("shardline.runtime.worker_process", fds, gpus)
        self._children[stream] = child
        return ours, encode_message(RankStarted(self._host_name, child.pid))

    def describe_end(self, stream: Stream) -> bytes:
        """The last frame for a process that has closed its end; empty if none of ours was there."""
        child = self._children.get(stream)
        if child is None:
            return b""
        name = f"(on {self._host_name}, pid {child.pid}) " if stream.rank == ENGINE else ""
        how = child.describe_end()
        return last_words(stream, name + how, None if child.is_silent() else child.poll())

    def retire(self, stream: Stream) -> None:
        """Give the process at a stream's end some seconds to end; unknown streams are ignored."""
        child = self._children.pop(stream, None)
        if child is not None:
            self._ending.append((time.monotonic() + _END_SECONDS, child))
        key = (stream.engine, stream.start)
        segment = self._segments.get(key)
        if segment is not None:
            segment.users.discard(stream)
            if not segment.users:
                os.close(self._segments.pop(key).fd)

    def check(self) -> None:
        """Kill processes that give no sign of life, and those that do not end in time."""
        for child in self._children.values():
            if child.is_silent():
                child.kill()  # its end of file follows, and `describe_end` says why
        now = time.monotonic()
        for deadline, child in list(self._ending):
            if child.poll() is not None:
                self._ending.remove((deadline, child))
            elif now >= deadline:
                child.kill()

    def beats(self) -> Iterator[tuple[Stream, bytes]]:
        """For each process, the frame that says how far it is."""
        for stream, child in self._children.items():
            if stream.rank == ENGINE:
                message: EngineBeat | RankBeat = EngineBeat(child.activity())
            else:
                segment = self._segments[stream.engine, stream.start]
                progress = segment.progress.read()[segment.ranks.index(stream.rank)]
                message = RankBeat(child.activity(), progress, segment.load.of_rank(stream.rank).tobytes())
            yield stream, encode_message(message)

    def end_all(self) -> None:
        """End all processes at once, since the head is lost or this node ends."""
        children = [*self._children.values(), *(child for _, child in self._ending)]
        for child in children:
            child.kill()
        for child in children:
            child.wait(2.0)
        for segment in self._segments.values():
            os.close(segment.fd)
        self._children, self._ending, self._segments = {}, [], {}


def last_words(stream: Stream, why: str, code: int | None = None, *, host_lost: bool = False) -> bytes:
    """The last frame of a stream whose far process has ended. `why` follows the name of a rank or an engine.

    `code`: its exit code; None: it has none. `host_lost`: its host is away.
    """
    if stream.rank == ENGINE:
        failed = EngineFailed(f"engine {stream.engine} {why}", host_lost=host_lost, suspicious=is_own_end(code))
        return encode_message(failed)
    return encode_message(RankEnded(why, code, host_lost))
