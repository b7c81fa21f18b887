"""A headless node: joins its head, runs the engines and ranks that the head places on it, and outlives the head."""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from shardline import __version__, env
from shardline.cluster.describe import describe_node, own_address
from shardline.cluster.links import answer
from shardline.cluster.node_processes import NodeProcesses, last_words
from shardline.cluster.streams import Streams
from shardline.cluster.wire import BEAT_SECONDS, SILENCE, NodeSocket, connect_to_head, find_token
from shardline.config.cluster import ClusterConfig
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.handshake import HandshakeRefused, run_callbacks
from shardline.limits import describe_shortage, raise_file_limit
from shardline.log import configure_logging
from shardline.messages.node import (
    ENGINE,
    Accepted,
    Beat,
    Connect,
    HeadMessage,
    HostLost,
    Join,
    Launch,
    Leave,
    Listen,
    Listening,
    Measured,
    Refused,
    Rejoin,
    Shutdown,
    StartStream,
    Stream,
    StreamData,
    StreamEnded,
    Unfit,
)
from shardline.process_title import set_process_title
from shardline.segment.pulse_watch import CHECK_INTERVAL, LoopWatch
from shardline.stop_signals import stop_signals

_NOTICE_SECONDS = 30.0
_OWN_DELAY = 2.0
_TELL_SECONDS = 2.0
_RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


class _HeadGone(Exception):
    """The node's head is away, or does not know the node any more."""


class _Ending(Exception):
    """The node must end, with an exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


class UnreadableMessage(ValueError):
    """The head speaks another version of the protocol."""


def run_node(config: EngineConfig, token: str | None = None) -> int:
    """Serve the head until it ends or SIGTERM arrives; returns the exit code. `token`: None: the user's.

    Raises:
        ValueError: the configuration is at fault, or the head refuses this node; the message says what to change.
    """
    configure_logging()
    raise_file_limit()
    set_process_title("node")
    token = token or find_token(config.cluster)
    address = own_address(config.cluster)
    try:
        join = describe_node(config, address)
    except ValueError as error:
        tell_head(config.cluster, token, Unfit(socket.gethostname(), address, str(error)))
        raise
    node = Node(config, token, join)
    for number in stop_signals():
        signal.signal(number, lambda *_: node.ask_to_leave())
    return node.run()


def tell_head(cluster: ClusterConfig, token: str, message: Unfit) -> None:
    """Tell the head, if it answers within some seconds, why this node does not join."""
    deadline = time.monotonic() + _TELL_SECONDS
    with contextlib.suppress(HandshakeRefused):
        wire = connect_to_head(token, cluster.head_address, cluster.head_port, lambda: time.monotonic() < deadline)
        if wire is not None:
            wire.send(message)
            wire.receive(deadline - time.monotonic())
            wire.close()


class Node:
    """Joins its head, again and again if the head is lost."""

    def __init__(self, config: EngineConfig, token: str, join: Join) -> None:
        self._config = config
        self._token = token
        self._join = join
        self._asked_to_leave = False
        self._watch = LoopWatch("node")
        self._decoder: msgspec.msgpack.Decoder[HeadMessage] = msgspec.msgpack.Decoder(HeadMessage)
        self._processes = NodeProcesses(join.host.name)
        self._deployment: Deployment | None = None
        self._wire: NodeSocket | None = None
        self._streams: Streams
        self._selector: selectors.BaseSelector
        self._heard, self._last_beat = time.monotonic(), 0.0
        self._measured: queue.SimpleQueue[Listening | Measured] = queue.SimpleQueue()

    def ask_to_leave(self) -> None:
        """End soon; for signal handlers."""
        self._asked_to_leave = True

    def run(self) -> int:
        """Serve heads, one after another, until one says when to end."""
        try:
            with self._watch:
                return self._serve_heads()
        finally:
            self._processes.end_all()

    def _serve_heads(self) -> int:
        while True:
            self._selector = selectors.DefaultSelector()
            self._streams = Streams(self._selector, self._send_frames, self._end_stream)
            try:
                self._join_head(time.monotonic() + self._config.cluster.join_timeout)
                self._serve()
            except _HeadGone as gone:
                _log.error("%s; its ranks end here, and the node waits for the next head", gone)
            except _Ending as ending:
                return ending.code
            except UnreadableMessage as error:
                host = self._join.host
                self._send(Unfit(host.name, host.address, str(error)))
                raise
            finally:
                self._processes.end_all()
                self._streams.close_all()
                if self._wire is not None:
                    self._wire.close()
                self._wire = None
                self._selector.close()

    def _join_head(self, deadline: float) -> None:
        """Wait for the head, and join it."""
        cluster = self._config.cluster
        place = f"the head at {cluster.head_address} port {cluster.head_port}"
        noticed = time.monotonic()

        def may_wait() -> bool:
            nonlocal noticed
            self._watch.note_round()
            if self._asked_to_leave:
                raise _Ending(0)
            if (now := time.monotonic()) >= deadline:
                _log.error("%s did not answer within --join-timeout %g s", place, cluster.join_timeout)
                raise _Ending(1)
            if now - noticed >= _NOTICE_SECONDS:
                noticed = now
                _log.warning("still waiting for %s", place)
            return True

        while may_wait():
            try:
                self._wire = connect_to_head(
                    self._token, cluster.head_address, cluster.head_port, may_wait, self._selector
                )
            except HandshakeRefused as error:
                raise ValueError(
                    f"{place} refuses the handshake: the join tokens differ, or another program listens there; copy "
                    "the head's token (--join-token-file, SHARDLINE_JOIN_TOKEN, ~/.config/shardline/join-token)"
                ) from error
            assert self._wire is not None, "may_wait ends otherwise"
            if self._ask_to_join(may_wait):
                _log.info("joined %s as node %d", place, self._join.node)
                return
            self._wire.close()

    def _ask_to_join(self, may_wait: Callable[[], bool]) -> bool:
        """Whether the head takes this node; False: the connection is good for nothing more."""
        assert self._wire is not None
        self._send(self._join)
        asked = time.monotonic()
        # A head answers at once. One that does not hangs, or what it sends does not arrive.
        while may_wait() and not self._wire.has_ended and time.monotonic() - asked < SILENCE:
            if (body := self._wire.receive(0.2)) is None:
                continue
            message = self._decode(body)
            if isinstance(message, Refused):
                raise ValueError(f"the head refuses this node: {message.message}")
            if isinstance(message, Accepted):
                env.adopt_isa(message.isa)
                self._heard, self._last_beat = time.monotonic(), 0.0
                return True
            if isinstance(message, Rejoin):
                time.sleep(max(0.0, asked + _RETRY_SECONDS - time.monotonic()))
                self._send(self._join)
                asked = time.monotonic()
        return False

    def _serve(self) -> None:
        assert self._wire is not None
        next_beat = next_check = 0.0
        while True:
            self._watch.note_round()
            now = time.monotonic()
            if self._asked_to_leave:
                _log.info("the node leaves; its requests go on elsewhere")
                self._send(Leave())
                raise _Ending(0)
            if now >= next_check:
                if now > next_check + _OWN_DELAY:  # this process was stopped, and has not read what the head has sent
                    self._heard = max(self._heard, now - SILENCE / 2)
                self._processes.check()
                next_check = now + CHECK_INTERVAL
                if now - self._heard > SILENCE:
                    raise _HeadGone(
                        f"the head has not been heard of for {SILENCE:g} s: it is down, stopped, or cut off"
                    )
            if now >= next_beat:
                self._send(Beat(self._last_beat))
                for stream, body in self._processes.beats():
                    self._send_frames(stream, [body])
                next_beat = now + BEAT_SECONDS
            while not self._measured.empty():
                self._send(self._measured.get())
            run_callbacks(self._selector, max(0.001, min(next_check, next_beat) - time.monotonic()))
            while self._wire.received:
                self._handle(self._decode(self._wire.received.popleft()))
            if self._wire.has_ended:
                raise _HeadGone("the head has closed the connection: its process has ended")

    def _handle(self, message: HeadMessage) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Beat):
            self._last_beat = message.sent
            self._send(message)
        elif isinstance(message, StreamData):
            self._streams.write(message.stream, message.bodies)
        elif isinstance(message, Launch):
            self._deployment = message.deployment
        elif isinstance(message, StartStream):
            self._try_to_start(message.stream)
        elif isinstance(message, StreamEnded):
            self._streams.close(message.stream)
            self._processes.retire(message.stream)
        elif isinstance(message, HostLost):
            self._end_streams_to(message.host, message.why)
        elif isinstance(message, Listen):
            self._send(answer(message, self._join.host.address))
        elif isinstance(message, Connect):
            threading.Thread(
                target=_measure,
                args=(message, self._join.host.address, self._measured),
                name="link-measure",
                daemon=True,
            ).start()
        elif isinstance(message, Rejoin):
            raise _HeadGone("the head does not know this node any more")
        elif isinstance(message, Shutdown):
            _log.log(logging.ERROR if message.code else logging.INFO, "the head ends: %s", message.reason)
            raise _Ending(message.code)

    def _try_to_start(self, stream: Stream) -> None:
        """Start what is at this end of a stream. If the host lacks what that needs, the far end is told."""
        try:
            self._start(stream)
        except OSError as error:
            why = f"could not be started on {self._join.host.name}: {describe_shortage(error) or error}"
            _log.error("a process %s", why)
            self._send_frames(stream, [last_words(stream, why)])
            self._send(StreamEnded(stream))
            self._processes.retire(stream)

    def _start(self, stream: Stream) -> None:
        """Start the engine or the rank at this end of a stream."""
        assert self._deployment is not None, "a head launches before it starts anything"
        if stream.rank == ENGINE:
            for end, sock in self._processes.start_engine(self._deployment, stream).items():
                self._streams.attach(end, sock)
                if end != stream:
                    self._send(StartStream(end))
            return
        sock, first_frame = self._processes.start_rank(self._deployment, stream)
        self._streams.attach(stream, sock)
        self._send_frames(stream, [first_frame])

    def _send(self, message: object) -> None:
        """Send the head a message. Without any connection it is lost, as in a connection that ends."""
        if self._wire is not None:
            self._wire.send(message)

    def _send_frames(self, stream: Stream, bodies: list[bytes]) -> None:
        self._send(StreamData(stream, bodies))

    def _end_stream(self, stream: Stream) -> None:
        """A process on this host has closed its end."""
        if last_frame := self._processes.describe_end(stream):
            self._send_frames(stream, [last_frame])
        self._send(StreamEnded(stream))
        self._processes.retire(stream)

    def _end_streams_to(self, host: int, why: str) -> None:
        """Another host is lost: end the streams that lead to it."""
        assert self._deployment is not None
        for stream in self._streams.all():
            places = self._deployment.placements[stream.engine]
            if stream.rank == ENGINE:
                continue
            if stream in self._processes:
                if places[0].host == host:
                    self._streams.close(stream)
                    self._processes.retire(stream)
            elif places[stream.rank].host == host:
                self._streams.close(stream, last_words(stream, why, host_lost=True))

    def _decode(self, body: bytes) -> HeadMessage:
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError:
            raise UnreadableMessage(
                f"the head sends messages that Shardline {__version__} on {self._join.host.name} cannot read; install "
                "the same version on all nodes"
            ) from None


def _measure(command: Connect, address: str, results: queue.SimpleQueue[Listening | Measured]) -> None:
    """Runs in a thread of its own, since it takes longer than messages may wait."""
    results.put(answer(command, address))
