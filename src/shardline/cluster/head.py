"""The head process: connects the processes of this host with those of the nodes, and watches the nodes.

It is a process of its own, so that neither HTTP nor steps delay what it passes on.
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import sys
import time

import msgspec

from shardline.channel import Channel, readable
from shardline.cluster.links import Survey
from shardline.cluster.members import Member, Members, name_difference
from shardline.cluster.streams import Relay
from shardline.cluster.wire import BEAT_SECONDS, SILENCE, UNANSWERED, FrameSocket, HeadSocket, send
from shardline.handshake import run_callbacks
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
from shardline.segment.pulse import start_pulse
from shardline.segment.pulse_watch import CHECK_INTERVAL, LoopWatch

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
        self._selector = selectors.DefaultSelector()
        self._decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)
        self._wire = HeadSocket(
            start.token, start.address, start.port, self._selector, self._receive, self._note_disconnected
        )
        self._relay = Relay(self._selector, self._members)
        self._survey = Survey(start.address, self._members, channel.send)
        self._shutdown: Shutdown | None = None
        self._noticed = time.monotonic()
        self._is_complete = False

    def run(self) -> None:
        """Serve until the front ends or says so."""
        self._selector.register(self._channel.fileno(), selectors.EVENT_READ, lambda _: self._look_at_front())
        self._selector.register(self._sockets.fileno(), selectors.EVENT_READ, lambda _: self._take_sockets())
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
                    member.send(self._shutdown)
            self._relay.close()
            self._wire.close()
            self._selector.close()

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
            run_callbacks(self._selector, max(0.001, next_check - now))

    def _look_at_front(self) -> None:
        if readable([self._channel.fileno()]):  # `_take_sockets` may have read its message
            self._handle_front()

    def _handle_front(self) -> None:
        message = self._channel.receive()
        if isinstance(message, Launch):
            self._relay.deployment = message.deployment
            if not self._is_complete:  # the nodes had joined a head process before this one
                self._noticed = time.monotonic() - _NOTICE_SECONDS + _REJOIN_SECONDS
            for member in self._members.present():
                member.send(message)
            self._report_members()
            self._survey.start(message.deployment)
        elif isinstance(message, Shutdown):
            self._shutdown = message

    def _take_sockets(self) -> None:
        """Take local ends of streams from the front, and have the nodes start the processes at the other ends."""
        data, fds, _, _ = socket.recv_fds(self._sockets, 1 << 16, 64)
        if not data:
            raise EOFError("the front has ended")
        # The deployment was sent before, perhaps with a node that has moved.
        while self._relay.deployment is None or readable([self._channel.fileno()]):
            self._handle_front()
        for stream, fd in zip(msgspec.msgpack.decode(data, type=list[Stream]), fds, strict=True):
            self._relay.attach(stream, socket.socket(fileno=fd))

    def _note_disconnected(self, peer: FrameSocket) -> None:
        """The connection of a node has ended, after its last messages."""
        if (member := self._members.find(peer)) is not None:
            self._lose(member, "has closed its connection: it has ended, or its network has failed")

    def _receive(self, peer: FrameSocket, body: bytes) -> None:
        """Handle a message of a node. A sender that has not joined is asked to."""
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError:
            self._handle_unreadable(peer, body)
            return
        if isinstance(message, Join):
            self._admit(peer, message)
            return
        if isinstance(message, Unfit):
            self._note_unfit(peer, message)
            return
        member = self._members.find(peer)
        if member is None:
            send(peer, Rejoin())
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

    def _admit(self, peer: FrameSocket, join: Join) -> None:
        former = self._members.of_node(join.node)
        if former is not None and join.process and former.join.process == join.process:
            if former.peer is peer:
                return  # it asked twice, and has its answer
            # After a cut, beats that it had sent before may have arrived only now.
            self._lose(former, "has given up its connection, and joins again")
        elif former is not None and time.monotonic() - former.heard > _QUIET:
            # Perhaps the same node after its sudden end. It asks again until the former is lost, or heard again.
            send(peer, Rejoin())
            return
        try:
            member = self._members.add(peer, join)
        except ValueError as error:
            self._refuse(peer, f"{join.host.name} ({join.host.address})", str(error))
            return
        member.send(Accepted(self._members.kernel_path(member)))
        if self._relay.deployment is not None:
            member.send(Launch(self._relay.deployment))
        missing = self._members.missing()
        cores = f"{join.host.cores} cores" + f", {len(join.host.devices) - 1} GPUs" * (len(join.host.devices) > 1)
        _log.info("%s has joined: %s; %s", member.name, cores, f"waiting for {missing}" if missing else "all are there")
        self._report_members()

    def _refuse(self, peer: FrameSocket, name: str, why: str) -> None:
        _log.error("%s is refused: %s", name, why)
        send(peer, Refused(why))

    def _handle_unreadable(self, peer: FrameSocket, body: bytes) -> None:
        """A node of another version has sent this, or a program that is no node."""
        if (member := self._members.find(peer)) is not None:
            self._lose(member, "has sent a message that this version cannot read")
        try:
            join = msgspec.msgpack.decode(body, type=ForeignJoin)
        except msgspec.MsgspecError:
            _log.debug("a message that is no node's is ignored")
            send(peer, Rejoin())
            return
        self._refuse(
            peer,
            f"{join.host.name} ({join.host.address})",
            name_difference(self._start.own.software, join.host.name, join.software)
            or f"its build of Shardline {join.software.get('shardline')} is not the head's: install one on all nodes",
        )

    def _note_unfit(self, peer: FrameSocket, message: Unfit) -> None:
        """A node has ended, because something is wrong on it."""
        if (member := self._members.find(peer)) is not None:
            self._lose(member, f"has ended: {message.why}")
        else:
            _log.error("%s (%s) cannot join: %s", message.name, message.address, message.why)
            if missing := self._members.missing():
                _log.warning("still waiting for %s", missing)
        send(peer, Refused(message.why))

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
            other.send(HostLost(host, words))

    def _check_members(self, now: float, *, was_late: bool, is_due: bool) -> None:
        """Lose nodes that are silent. `is_due`: the others get a beat."""
        self._wire.check()
        self._survey.check(now)
        for member in self._members.present():
            if was_late:  # this process was stopped, and has not read what the nodes have sent
                member.heard = member.answered = now
            if now - member.heard > SILENCE:
                self._lose(member, f"has not been heard of for {SILENCE:g} s: it is down, stopped, or cut off")
            elif now - member.answered > UNANSWERED:
                self._lose(member, f"has not answered for {UNANSWERED:g} s: what the head sends does not arrive")
            elif is_due:
                member.send(Beat(now))
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
