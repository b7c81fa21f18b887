"""The head process: connects the processes of this host with those of the nodes, and watches the nodes.

It is a process of its own, so that neither HTTP nor steps delay what it passes on.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import sys
import time

import msgspec
import zmq

from shardline.channel import Channel
from shardline.cluster.members import Member, Members
from shardline.cluster.messages import (
    ENGINE,
    Accepted,
    Beat,
    FrontToHead,
    HeadFailed,
    HostLost,
    Join,
    Joined,
    Launch,
    Leave,
    NodeMessage,
    NodesPresent,
    Refused,
    Rejoin,
    Shutdown,
    StartHead,
    StartStream,
    Stream,
    StreamData,
    StreamEnded,
)
from shardline.cluster.node_processes import last_words
from shardline.cluster.streams import Streams
from shardline.cluster.wire import BEAT_SECONDS, SILENCE, HeadSocket, encode
from shardline.deployment.deployment import Deployment
from shardline.log import configure_logging
from shardline.process_title import set_process_title
from shardline.segment.pulse import start_pulse

_NOTICE_SECONDS = 30.0
_OWN_DELAY = 2.0
_log = logging.getLogger(__name__)


class Head:
    """Serves one front over a channel, and nodes over the network."""

    def __init__(self, channel: Channel[FrontToHead], sockets: socket.socket) -> None:
        """`sockets`: a SOCK_SEQPACKET over which the front sends local ends of streams."""
        self._channel = channel
        self._sockets = sockets
        start = channel.receive()
        assert isinstance(start, StartHead)
        self._start = start
        self._members = Members(start)
        self._poller = zmq.Poller()
        self._streams = Streams(self._poller, self._send_data, self._end_stream)
        self._deployment: Deployment | None = None
        self._decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)
        self._wire = HeadSocket(start.token, start.address, start.port)
        self._shutdown: Shutdown | None = None
        self._noticed = time.monotonic()
        self._is_complete = False

    def run(self) -> None:
        """Serve until the front ends or says so."""
        self._poller.register(self._wire.socket, zmq.POLLIN)
        self._poller.register(self._channel.fileno(), zmq.POLLIN)
        self._poller.register(self._sockets.fileno(), zmq.POLLIN)
        _log.info("the head waits at %s port %d for %s", self._start.address, self._start.port, self._members.missing())
        self._report_members()
        next_beat = 0.0
        try:
            while self._shutdown is None:
                now = time.monotonic()
                if now >= next_beat:
                    self._beat(now, was_late=now > next_beat + _OWN_DELAY)
                    next_beat = now + BEAT_SECONDS
                for source, event in self._poller.poll(max(1, int((next_beat - now) * 1000))):
                    self._handle(source, event)
        except EOFError:
            _log.debug("the front has ended")
        finally:
            if self._shutdown is not None:
                for member in self._members.present():
                    self._send(member, self._shutdown)
            self._streams.close_all()
            self._wire.close()

    def _handle(self, source: object, event: int) -> None:
        if source is self._wire.socket:
            # A bounded number, so that local streams get their turn.
            for _ in range(64):
                try:
                    identity, body = self._wire.socket.recv_multipart(zmq.NOBLOCK)
                except (zmq.Again, ValueError):
                    return
                self._receive(identity, body)
        elif source == self._channel.fileno():
            message = self._channel.receive()
            if isinstance(message, Launch):
                self._deployment = message.deployment
                for member in self._members.present():
                    self._send(member, message)
                self._report_members()
            elif isinstance(message, Shutdown):
                self._shutdown = message
        elif source == self._sockets.fileno():
            self._take_sockets()
        else:
            assert isinstance(source, int)
            self._streams.handle_event(source, event)

    def _take_sockets(self) -> None:
        """Take local ends of streams from the front, and have the nodes start the processes at the other ends."""
        data, fds, _, _ = socket.recv_fds(self._sockets, 1 << 16, 64)
        if not data:
            raise EOFError("the front has ended")
        while self._deployment is None:  # it was sent before
            self._handle(self._channel.fileno(), zmq.POLLIN)
        for stream, fd in zip(msgspec.msgpack.decode(data, type=list[Stream]), fds, strict=True):
            self._streams.attach(stream, socket.socket(fileno=fd))
            self._start_for(None, stream)

    def _start_for(self, asking: Member | None, stream: Stream) -> None:
        """Have a node start the process at the far end of a stream, for the front or for another node."""
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            self._send(member, StartStream(stream))
            return
        why = f"cannot start: {self._members.missing() or 'its node'} is away"
        if asking is None:
            self._streams.close(stream, last_words(stream, why))
        else:
            self._send(asking, StreamData(stream, last_words(stream, why)))
            self._send(asking, StreamEnded(stream))

    def _receive(self, identity: bytes, body: bytes) -> None:
        """Handle a message of a node. Whoever sends anything else is asked to join anew."""
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError:
            _log.warning("a node sent a message that cannot be read; it must join anew")
            self._send_to(identity, Rejoin())
            return
        if isinstance(message, Join):
            self._admit(identity, message)
            return
        member = self._members.find(identity)
        if member is None:
            self._send_to(identity, Rejoin())
            return
        member.heard = time.monotonic()
        if isinstance(message, StreamData):
            self._pass_on(member, message)
        elif isinstance(message, StreamEnded):
            if message.stream in self._streams:
                self._streams.close(message.stream)
            elif (other := self._other_node(member, message.stream)) is not None:
                self._send(other, message)
        elif isinstance(message, StartStream):
            self._start_for(member, message.stream)
        elif isinstance(message, Leave):
            self._lose(member, "leaves, as it was asked to")

    def _admit(self, identity: bytes, join: Join) -> None:
        try:
            member = self._members.add(identity, join)
        except ValueError as error:
            _log.error("%s (%s) is refused: %s", join.host.name, join.host.address, error)
            self._send_to(identity, Refused(str(error)))
            return
        self._send(member, Accepted(self._start.own.host.devices[0].capability))
        if self._deployment is not None:
            self._send(member, Launch(self._deployment))
        missing = self._members.missing()
        cores = f"{join.host.cores} cores" + f", {len(join.host.devices) - 1} GPUs" * (len(join.host.devices) > 1)
        _log.info("%s has joined: %s; %s", member.name, cores, f"waiting for {missing}" if missing else "all are there")
        self._report_members()

    def _report_members(self) -> None:
        """Tell the front once that all nodes are there, and later which are."""
        if not self._is_complete:
            if self._members.missing():
                return
            self._is_complete = True
            self._channel.send(Joined(self._members.settle()))
        self._channel.send(NodesPresent((0, *(self._members.host_of(member) for member in self._members.present()))))

    def _lose(self, member: Member, why: str) -> None:
        """Forget a node, and end all of its streams."""
        _log.error("%s %s", member.name, why)
        host = self._members.host_of(member)
        self._members.remove(member)
        for stream in self._streams.all():
            if self._where_runs(stream) == host:
                self._streams.close(stream, last_words(stream, f"is on {member.name}, which {why}"))
        for other in self._members.present():
            self._send(other, HostLost(host, f"is on {member.name}, which {why}"))
        self._report_members()

    def _send_data(self, stream: Stream, data: bytes) -> None:
        """Frames of a process on this host travel to the far end."""
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            self._send(member, StreamData(stream, data))

    def _end_stream(self, stream: Stream) -> None:
        if (member := self._members.at_index(self._where_runs(stream))) is not None:
            self._send(member, StreamEnded(stream))

    def _pass_on(self, member: Member, message: StreamData) -> None:
        if message.stream in self._streams:
            self._streams.write(message.stream, message.data)
        elif (other := self._other_node(member, message.stream)) is not None:
            self._send(other, message)

    def _other_node(self, member: Member, stream: Stream) -> Member | None:
        """The node at the other end of a stream between two nodes."""
        if self._deployment is None or stream.rank == ENGINE:
            return None
        places = self._deployment.placements[stream.engine]
        hosts = {places[0].host, places[stream.rank].host} - {self._members.host_of(member)}
        return self._members.at_index(hosts.pop()) if hosts else None

    def _where_runs(self, stream: Stream) -> int:
        """The host on which the process at the far end of a stream runs."""
        assert self._deployment is not None, "the front launches before it starts anything"
        return self._deployment.placements[stream.engine][max(0, stream.rank)].host

    def _beat(self, now: float, *, was_late: bool) -> None:
        for member in self._members.present():
            if was_late:  # this process was stopped, and has not read what the nodes have sent
                member.heard = now
            if now - member.heard > SILENCE:
                self._lose(member, f"has not been heard of for {SILENCE:g} s: it is down, stopped, or cut off")
            else:
                self._send(member, Beat())
        if now - self._noticed >= _NOTICE_SECONDS:
            self._noticed = now
            if missing := self._members.missing():
                _log.warning("still waiting for %s", missing)

    def _send(self, member: Member, message: object) -> None:
        self._send_to(member.identity, message)

    def _send_to(self, identity: bytes, message: object) -> None:
        # A node that has gone is noticed by its silence.
        with contextlib.suppress(zmq.ZMQError):
            self._wire.socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)


def main() -> None:
    """Entry point; the arguments are descriptors: of the front's channel, of its sockets, and of the pulse."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel_fd, sockets_fd, pulse = map(int, sys.argv[1:])
    start_pulse(pulse)
    configure_logging()
    set_process_title("head")
    channel: Channel[FrontToHead] = Channel(socket.socket(fileno=channel_fd), FrontToHead)  # type: ignore[arg-type]
    try:
        Head(channel, socket.socket(fileno=sockets_fd)).run()
    except ValueError as error:
        channel.send(HeadFailed(str(error), user_error=True))
        select.select([channel.fileno()], [], [], 5.0)
