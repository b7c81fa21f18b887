"""The head's part in streams: it passes frames between the processes of this host and the nodes, and between nodes."""

from __future__ import annotations

import socket

import zmq

from shardline.cluster.members import Member, Members
from shardline.cluster.node_processes import last_words
from shardline.cluster.streams import Streams
from shardline.cluster.wire import HeadSocket
from shardline.deployment.deployment import Deployment
from shardline.messages.node import ENGINE, StartStream, Stream, StreamData, StreamEnded


class Relay:
    """Knows which node is at the far end of a stream. One thread calls all methods."""

    def __init__(self, poller: zmq.Poller, members: Members, wire: HeadSocket) -> None:
        self.deployment: Deployment | None = None
        """What runs where; None before the first launch."""
        self._members = members
        self._wire = wire
        self._streams = Streams(poller, self._send_data, self._end_stream)

    def attach(self, stream: Stream, sock: socket.socket) -> None:
        """Serve the front's end of a stream, and start the process at the other end."""
        self._streams.attach(stream, sock)
        self.start(None, stream)

    def start(self, asking: Member | None, stream: Stream) -> None:
        """Have a node start the process at the far end of a stream, for the front (None) or for another node."""
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            self._wire.send(member.identity, StartStream(stream))
            return
        why = f"cannot start: {self._members.missing() or 'its node'} is away"
        if asking is None:
            self._streams.close(stream, last_words(stream, why, host_lost=True))
        else:
            self._wire.send(asking.identity, StreamData(stream, last_words(stream, why, host_lost=True)))
            self._wire.send(asking.identity, StreamEnded(stream))

    def pass_on(self, member: Member, message: StreamData | StreamEnded) -> None:
        """Pass what a node sends to the other end of the stream."""
        stream = message.stream
        if stream not in self._streams:
            if (other := self._other_node(member, stream)) is not None:
                self._wire.send(other.identity, message)
        elif isinstance(message, StreamData):
            self._streams.write(stream, message.data)
        else:
            self._streams.close(stream)

    def end_streams_to(self, host: int, why: str) -> None:
        """A host is lost: end the front's streams to it. `why` follows the name of a process on it."""
        for stream in self._streams.all():
            if self._where_runs(stream) == host:
                self._streams.close(stream, last_words(stream, why, host_lost=True))

    def handle_event(self, fd: int, event: int) -> None:
        """Read from or write to a local end that the poller has found ready."""
        self._streams.handle_event(fd, event)

    def close(self) -> None:
        """Close all local ends."""
        self._streams.close_all()

    def _send_data(self, stream: Stream, data: bytes) -> None:
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            self._wire.send(member.identity, StreamData(stream, data))

    def _end_stream(self, stream: Stream) -> None:
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            self._wire.send(member.identity, StreamEnded(stream))

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
