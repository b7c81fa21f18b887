"""The head process: connects the processes of this host with those of the nodes, and watches the nodes.

It is a process of its own, so that neither HTTP nor steps delay what it passes on.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import time

import msgspec
import zmq

from shardline.channel import Channel, readable
from shardline.cluster.loop_watch import LoopWatch
from shardline.cluster.members import Member, Members, name_difference
from shardline.cluster.relay import Relay
from shardline.cluster.survey import Survey
from shardline.cluster.wire import BEAT_SECONDS, SILENCE, UNANSWERED, HeadSocket
from shardline.log import configure_logging
from shardline.messages.node import (
    Accepted,
    Beat,
    ForeignJoin,
    FrontToHead,
    HeadFailed,
    HostLost,
    Join,
    Joined,
    Launch,
    Leave,
    Listening,
    Measured,
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
    Unfit,
)
from shardline.process_title import set_process_title
from shardline.segment.pulse import CHECK_INTERVAL, start_pulse

_NOTICE_SECONDS = 30.0
_REJOIN_SECONDS = 4.0
"""Seconds after which a head process that has started again names the nodes that do not join anew."""
_OWN_DELAY = 2.0
_QUIET = 1.5 * BEAT_SECONDS
"""Seconds of silence after which a node may have ended, although it does not count as lost yet."""
_log = logging.getLogger(__name__)


class Head:
    """Serves one front over a channel, and nodes over the network."""

    def __init__(self, channel: Channel[FrontToHead], sockets: socket.socket) -> None:
        """`sockets`: a SOCK_SEQPACKET over which the front sends local ends of streams.

        Raises:
            ValueError: the head cannot listen at its address.
        """
        self._channel = channel
        self._sockets = sockets
        start = channel.receive()
        assert isinstance(start, StartHead)
        self._start = start
        self._members = Members(start)
        self._poller = zmq.Poller()
        self._decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)
        self._wire = HeadSocket(start.token, start.address, start.port)
        self._relay = Relay(self._poller, self._members, self._wire)
        self._survey = Survey(start.address, self._members, self._wire, channel.send)
        self._shutdown: Shutdown | None = None
        self._noticed = time.monotonic()
        self._is_complete = False

    def run(self) -> None:
        """Serve until the front ends or says so."""
        self._monitor = self._wire.watch_connections()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wire.socket, zmq.POLLIN)
        self._poller.register(self._channel.fileno(), zmq.POLLIN)
        self._poller.register(self._sockets.fileno(), zmq.POLLIN)
        _log.info("the head waits at %s port %d for %s", self._start.address, self._start.port, self._members.missing())
        self._report_members()
        try:
            with LoopWatch("head process") as watch:
                self._serve(watch)
        except (EOFError, ConnectionError):  # the latter if there is something to tell it
            _log.debug("the front has ended")
        finally:
            if self._shutdown is not None:
                for member in self._members.present():
                    self._wire.send(member.identity, self._shutdown)
            self._relay.close()
            self._wire.close()

    def _serve(self, watch: LoopWatch) -> None:
        next_beat = next_check = 0.0
        while self._shutdown is None:
            watch.note_round()
            now = time.monotonic()
            if now >= next_check:
                self._check_members(now, was_late=now > next_check + _OWN_DELAY, is_due=now >= next_beat)
                next_check = now + CHECK_INTERVAL
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
            for source, event in self._poller.poll(max(1, int((next_check - now) * 1000))):
                self._handle(source, event)

    def _handle(self, source: object, event: int) -> None:
        if source is self._monitor:
            self._lose_disconnected()
        elif source is self._wire.socket:
            # A bounded number, so that local streams get their turn.
            for _ in range(64):
                try:
                    identity, body, connection = self._wire.receive()
                except (zmq.Again, ValueError):
                    return
                self._receive(identity, body, connection)
        elif source == self._channel.fileno():
            message = self._channel.receive()
            if isinstance(message, Launch):
                self._relay.deployment = message.deployment
                if not self._is_complete:  # the nodes had joined a head process before this one
                    self._noticed = time.monotonic() - _NOTICE_SECONDS + _REJOIN_SECONDS
                for member in self._members.present():
                    self._wire.send(member.identity, message)
                self._report_members()
                self._survey.start(message.deployment)
            elif isinstance(message, Shutdown):
                self._shutdown = message
        elif source == self._sockets.fileno():
            self._take_sockets()
        else:
            assert isinstance(source, int)
            self._relay.handle_event(source, event)

    def _take_sockets(self) -> None:
        """Take local ends of streams from the front, and have the nodes start the processes at the other ends."""
        data, fds, _, _ = socket.recv_fds(self._sockets, 1 << 16, 64)
        if not data:
            raise EOFError("the front has ended")
        # The deployment was sent before, perhaps with a node that has moved.
        while self._relay.deployment is None or readable([self._channel.fileno()]):
            self._handle(self._channel.fileno(), zmq.POLLIN)
        for stream, fd in zip(msgspec.msgpack.decode(data, type=list[Stream]), fds, strict=True):
            self._relay.attach(stream, socket.socket(fileno=fd))

    def _lose_disconnected(self) -> None:
        """Forget nodes whose connections have ended, after their last messages."""
        lost = self._members.on_connections(set(self._wire.ended_connections()))
        if not lost:
            return
        with contextlib.suppress(zmq.Again, ValueError):
            while True:
                self._receive(*self._wire.receive())
        for member in lost:
            if self._members.find(member.identity) is member:
                self._lose(member, "has closed its connection: it has ended, or its network has failed")

    def _receive(self, identity: bytes, body: bytes, connection: int) -> None:
        """Handle a message of a node. A sender that has not joined is asked to."""
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError:
            self._handle_unreadable(identity, body)
            return
        if isinstance(message, Join):
            self._lose_disconnected()  # the number of the connection may have been another node's
            self._admit(identity, message, connection)
            return
        if isinstance(message, Unfit):
            self._note_unfit(identity, message)
            return
        member = self._members.find(identity)
        if member is None:
            self._wire.send(identity, Rejoin())
            return
        member.heard = time.monotonic()
        if isinstance(message, Beat):
            member.answered = max(member.answered, min(message.sent, member.heard))
        elif isinstance(message, (StreamData, StreamEnded)):
            self._relay.pass_on(member, message)
        elif isinstance(message, StartStream):
            self._relay.start(member, message.stream)
        elif isinstance(message, (Listening, Measured)):
            self._survey.handle(member, message)
        elif isinstance(message, Leave):
            self._lose(member, "leaves, as it was asked to")

    def _admit(self, identity: bytes, join: Join, connection: int) -> None:
        former = self._members.of_node(join.node)
        if former is not None and join.process and former.join.process == join.process:
            if former.identity == identity:
                former.connection = connection
                return  # it asked twice, and has its answer
            # After a cut, beats that it had sent before may have arrived only now.
            self._lose(former, "has given up its connection, and joins again")
        elif former is not None and time.monotonic() - former.heard > _QUIET:
            # Perhaps the same node after its sudden end. It asks again until the former is lost, or heard again.
            self._wire.send(identity, Rejoin())
            return
        try:
            member = self._members.add(identity, join, connection)
        except ValueError as error:
            self._refuse(identity, f"{join.host.name} ({join.host.address})", str(error))
            return
        self._wire.send(identity, Accepted(self._members.kernel_path(member)))
        if self._relay.deployment is not None:
            self._wire.send(identity, Launch(self._relay.deployment))
        missing = self._members.missing()
        cores = f"{join.host.cores} cores" + f", {len(join.host.devices) - 1} GPUs" * (len(join.host.devices) > 1)
        _log.info("%s has joined: %s; %s", member.name, cores, f"waiting for {missing}" if missing else "all are there")
        self._report_members()

    def _refuse(self, identity: bytes, name: str, why: str) -> None:
        _log.error("%s is refused: %s", name, why)
        self._wire.send(identity, Refused(why))

    def _handle_unreadable(self, identity: bytes, body: bytes) -> None:
        """A node of another version has sent this, or a program that is no node."""
        if (member := self._members.find(identity)) is not None:
            self._lose(member, "has sent a message that this version cannot read")
        try:
            join = msgspec.msgpack.decode(body, type=ForeignJoin)
        except msgspec.MsgspecError:
            _log.debug("a message that is no node's is ignored")
            self._wire.send(identity, Rejoin())
            return
        self._refuse(
            identity,
            f"{join.host.name} ({join.host.address})",
            name_difference(self._start.own.software, join.host.name, join.software)
            or f"its build of Shardline {join.software.get('shardline')} is not the head's: install one on all nodes",
        )

    def _note_unfit(self, identity: bytes, message: Unfit) -> None:
        """A node has ended, because something is wrong on it."""
        if (member := self._members.find(identity)) is not None:
            self._lose(member, f"has ended: {message.why}")
        else:
            _log.error("%s (%s) cannot join: %s", message.name, message.address, message.why)
            if missing := self._members.missing():
                _log.warning("still waiting for %s", missing)
        self._wire.send(identity, Refused(message.why))

    def _report_members(self) -> None:
        """Tell the front once that all nodes are there, and later which are."""
        if not self._is_complete:
            if self._members.missing():
                return
            self._is_complete = True
            self._channel.send(Joined(self._members.settle()))
        members = self._members.present()
        hosts = (0, *(self._members.host_of(member) for member in members))
        self._channel.send(NodesPresent(hosts, tuple(member.join for member in members)))

    def _lose(self, member: Member, why: str) -> None:
        """Forget a node, and end all of its streams."""
        _log.error("%s %s", member.name, why)
        host, words = self._members.host_of(member), f"is on {member.name}, which {why}"
        self._members.remove(member)
        self._report_members()  # first, so that nothing starts there again
        self._relay.end_streams_to(host, words)
        for other in self._members.present():
            self._wire.send(other.identity, HostLost(host, words))

    def _check_members(self, now: float, *, was_late: bool, is_due: bool) -> None:
        """Lose nodes that are silent. `is_due`: the others get a beat."""
        self._survey.check(now)
        for member in self._members.present():
            if was_late:  # this process was stopped, and has not read what the nodes have sent
                member.heard = member.answered = now
            if now - member.heard > SILENCE:
                self._lose(member, f"has not been heard of for {SILENCE:g} s: it is down, stopped, or cut off")
            elif now - member.answered > UNANSWERED:
                self._lose(member, f"has not answered for {UNANSWERED:g} s: what the head sends does not arrive")
            elif is_due:
                self._wire.send(member.identity, Beat(now))
        if now - self._noticed >= _NOTICE_SECONDS:
            self._noticed = now
            if missing := self._members.missing():
                _log.warning("still waiting for %s", missing)


def main() -> None:
    """Entry point; the arguments are descriptors: of the front's channel, of its sockets, and of the pulse."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel_fd, sockets_fd, pulse = map(int, sys.argv[1:])
    start_pulse(pulse)
    configure_logging()
    set_process_title("head")
    channel: Channel[FrontToHead] = Channel(socket.socket(fileno=channel_fd), FrontToHead)  # type: ignore[arg-type]
    try:
        Head(channel, socket.socket(fileno=sockets_fd)).run()
    except EOFError:
        _log.debug("the front has ended before the start")
    except ValueError as error:
        channel.send(HeadFailed(str(error), user_error=True))
        readable([channel.fileno()], 5.0)
