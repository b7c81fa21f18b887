"""Streams: channels between processes of two hosts. Frames travel through the head and the node of the far process."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from functools import partial

from shardline.cluster.members import Member, Members
from shardline.cluster.node_processes import last_words
from shardline.cluster.wire import FrameSocket
from shardline.deployment.deployment import Deployment
from shardline.messages.node import ENGINE, StartStream, Stream, StreamData, StreamEnded


class Streams:
    """The local ends: sockets of processes on this host. One thread calls all methods.

    Frames are passed on whole, so the owner may put frames of its own between them.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_frames: Callable[[Stream, list[bytes]], None],
        on_end: Callable[[Stream], None],
    ) -> None:
        """`on_end` is called once a process on this host has closed its end; the stream is forgotten by then."""
        self._selector = selector
        self._on_frames = on_frames
        self._on_end = on_end
        self._ends: dict[Stream, FrameSocket] = {}
        self._closing: list[FrameSocket] = []
        """Ends that have something left to send."""

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._ends

    def all(self) -> list[Stream]:
        return list(self._ends)

    def attach(self, stream: Stream, sock: socket.socket) -> None:
        """Serve the local end of a stream from now on; this object closes the socket."""
        self._ends[stream] = FrameSocket(
            sock, self._selector, partial(self._on_frames, stream), partial(self._forget, stream)
        )

    def write(self, stream: Stream, bodies: list[bytes]) -> None:
        """Send frames to the process on this host; those of a stream that has ended are dropped."""
        if (end := self._ends.get(stream)) is not None:
            for body in bodies:
                end.send(body)

    def close(self, stream: Stream, last_frame: bytes = b"") -> None:
        """Close the local end of a stream, after all that was written and `last_frame`."""
        if (end := self._ends.pop(stream, None)) is not None:
            if last_frame:
                end.send(last_frame)
            end.close()
            self._closing = [closing for closing in (*self._closing, end) if not closing.is_closed]

    def close_all(self) -> None:
        for end in (*self._ends.values(), *self._closing):
            end.drop()
        self._ends, self._closing = {}, []

    def _forget(self, stream: Stream) -> None:
        if self._ends.pop(stream, None) is not None:
            self._on_end(stream)


class Relay:
    """The head's part: it knows which node is at the far end of a stream, and passes frames between nodes too."""

    def __init__(self, selector: selectors.BaseSelector, members: Members) -> None:
        self.deployment: Deployment | None = None
        """What runs where; None before the first launch."""
        self._members = members
        self._streams = Streams(selector, self._send_frames, self._end_stream)

    def attach(self, stream: Stream, sock: socket.socket) -> None:
        """Serve the front's end of a stream, and start the process at the other end."""
        self._streams.attach(stream, sock)
        self.start(None, stream)

    def start(self, asking: Member | None, stream: Stream) -> None:
        """Have a node start the process at the far end of a stream, for the front (None) or for another node."""
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            member.send(StartStream(stream))
            return
        why = f"cannot start: {self._members.missing() or 'its node'} is away"
        words = last_words(stream, why, host_lost=True)
        if asking is None:
            self._streams.close(stream, words)
        else:
            asking.send(StreamData(stream, [words]))
            asking.send(StreamEnded(stream))

    def pass_on(self, member: Member, message: StreamData | StreamEnded) -> None:
        """Pass what a node sends to the other end of the stream."""
        stream = message.stream
        if stream not in self._streams:
            if (other := self._other_node(member, stream)) is not None:
                other.send(message)
        elif isinstance(message, StreamData):
            self._streams.write(stream, message.bodies)
        else:
            self._streams.close(stream)

    def end_streams_to(self, host: int, why: str) -> None:
        """A host is lost: end the front's streams to it. `why` follows the name of a process on it."""
        for stream in self._streams.all():
            if self._where_runs(stream) == host:
                self._streams.close(stream, last_words(stream, why, host_lost=True))

    def close(self) -> None:
        self._streams.close_all()

    def _send_frames(self, stream: Stream, bodies: list[bytes]) -> None:
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            member.send(StreamData(stream, bodies))

    def _end_stream(self, stream: Stream) -> None:
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            member.send(StreamEnded(stream))

    def _other_node(self, member: Member, stream: Stream) -> Member | None:
        """The node at the other end of a stream between two nodes."""
        if self.deployment is None or stream.rank == ENGINE:
            return None
        places = self.deployment.placements[stream.engine]
        hosts = {places[0].host, places[stream.rank].host} - {self._members.host_of(member)}
        return self._members.at_index(hosts.pop()) if hosts else None

    def _where_runs(self, stream: Stream) -> int:
        """The host on which the process at the far end of a stream runs."""
        assert self.deployment is not None, "the front launches before it starts anything"
        return self.deployment.placements[stream.engine][max(0, stream.rank)].host
