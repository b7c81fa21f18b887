"""Nodes that do not fit: what the head answers, and what both sides say, one line each, with the fix."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace

from shardline import __version__
from shardline.channel import Channel
from shardline.cluster.head import Head
from shardline.cluster.node import Node, UnreadableMessage, tell_head
from shardline.cluster.wire import FrameSocket, NodeSocket
from shardline.config.engine import EngineConfig
from shardline.deployment.machine import Machine
from shardline.messages.node import (
    ENGINE,
    Accepted,
    Beat,
    FrontToHead,
    HeadMessage,
    Join,
    Launch,
    NodeMessage,
    Refused,
    Rejoin,
    Shutdown,
    StartStream,
    Stream,
    StreamData,
    StreamEnded,
    Unfit,
)
from tests.cluster.heads import FakeHead
from tests.cluster.joins import node, start
from tests.deployment.machines import host, resolve_on

TOKEN = "the-token-of-this-test-1"


class FakeNode:
    """The socket of a node, and what comes to it."""

    def __init__(self, port: int) -> None:
        self.wire = NodeSocket(TOKEN, "127.0.0.1", port)

    def ask(self, message: object) -> HeadMessage:
        """The answer to a message or to bytes."""
        self.wire._peer.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        return self.receive(5.0)

    def receive(self, timeout: float) -> HeadMessage:
        body = self.wire.receive(timeout)
        assert body is not None, "no answer"
        message: HeadMessage = msgspec.msgpack.decode(body, type=HeadMessage)
        return message


@pytest.fixture
def front(own: Join, port: int, caplog: pytest.LogCaptureFixture) -> Iterator[socket.socket]:
    """The front's end of the channel to a head that waits for nodes 1 and 2."""
    caplog.set_level(logging.INFO)
    front, theirs = socket.socketpair()
    sockets, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel: Channel[FrontToHead] = Channel(theirs, FrontToHead)  # type: ignore[arg-type]
    with front, theirs, sockets, passed:
        Channel(front, Join).send(start(own, token=TOKEN, address="127.0.0.1", port=port))
        thread = threading.Thread(target=Head(channel, passed).run, daemon=True)
        thread.start()
        yield front
        front.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture
def head(front: socket.socket, port: int) -> int:
    """The port of the head."""
    return port


@pytest.fixture
def fake(head: int) -> Iterator[FakeNode]:
    fake = FakeNode(head)
    yield fake
    fake.wire.close()


def cluster_config(port: int) -> EngineConfig:
    return EngineConfig.from_options(
        model="demo", device="cpu", nnodes=3, node_rank=1, master_addr="127.0.0.1", master_port=port
    )


def test_a_node_whose_version_cannot_be_read_is_refused_with_both(
    own: Join, fake: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    join = msgspec.to_builtins(node(own, 1))
    del join["flags"]
    later = {**join, "software": {**join["software"], "shardline": "9.9", "Python": "4.0"}, "new": 1}
    answer = fake.ask(later)
    assert answer == Refused(f"shardline differs: the head has {__version__}, host1 9.9")
    assert f"host1 (10.0.0.2) is refused: shardline differs: the head has {__version__}, host1 9.9" in caplog.text
    answer = fake.ask(join)
    assert isinstance(answer, Refused)
    assert f"its build of Shardline {__version__} is not the head's" in answer.message


def test_a_doctor_is_answered_quietly(fake: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(fake.ask({"type": "Hello", "facts": {}}), Rejoin)
    assert isinstance(fake.ask(b"\xff\x00 no message at all"), Rejoin)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_member_that_cannot_be_read_is_lost(own: Join, fake: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(fake.ask(node(own, 1)), Accepted)
    while not isinstance(fake.ask({"type": "Nonsense"}), Rejoin):
        pass
    assert "node 1 (host1, 10.0.0.2) has sent a message that this version cannot read" in caplog.text
    assert isinstance(fake.ask(node(own, 1)), Accepted)


def test_a_node_that_lacks_the_model_tells_the_head(
    own: Join, head: int, fake: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    tell_head(cluster_config(head).cluster, TOKEN, Unfit("host2", "10.0.0.3", "no model: `shardline download M`"))
    assert "host2 (10.0.0.3) cannot join: no model: `shardline download M`" in caplog.text
    assert "still waiting for nodes 1, 2 (--node-rank)" in caplog.text
    assert isinstance(fake.ask(node(own, 1)), Accepted), "the head still takes nodes"


@pytest.mark.slow
def test_a_head_that_starts_again_names_nodes_that_do_not_come_back(
    front: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start, nodes have more time: people start them."""
    monkeypatch.setattr("shardline.cluster.head._REJOIN_SECONDS", 1.2)
    time.sleep(1.5)
    assert "still waiting" not in caplog.text
    hosts = tuple(host(name=f"host{index}") for index in range(3))
    Channel(front, Join).send(Launch(resolve_on(Machine(hosts), device="cpu", pipeline_parallel_size=3)))
    deadline = time.monotonic() + 10
    while "still waiting for nodes 1, 2 (--node-rank)" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_node_that_came_back_at_once_is_not_refused(
    own: Join, head: int, fake: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(fake.ask(node(own, 1)), Accepted)
    again = FakeNode(head)
    refused = again.ask(node(own, 1))
    assert isinstance(refused, Refused), "the other one has just been heard"
    assert "is taken by host1" in refused.message
    monkeypatch.setattr("shardline.cluster.head._QUIET", 0.1)
    time.sleep(0.2)
    assert isinstance(again.ask(node(own, 1)), Rejoin), "it may ask again until the former counts as lost"
    again.wire.close()


def test_a_node_that_joins_again_takes_its_own_place(own: Join, head: int, caplog: pytest.LogCaptureFixture) -> None:
    """Beats from before a cut may arrive after it, so that the head has just heard of the former connection."""
    first, again, other = FakeNode(head), FakeNode(head), FakeNode(head)
    join = replace(node(own, 1), process=b"the same")
    assert isinstance(first.ask(join), Accepted)
    assert isinstance(again.ask(join), Accepted)
    assert "has given up its connection, and joins again" in caplog.text
    refused = other.ask(replace(join, process=b"another"))
    assert isinstance(refused, Refused)
    assert "--node-rank 1 is taken by" in refused.message
    for one in (first, again, other):
        one.wire.close()


def test_a_node_whose_connection_ends_is_lost_at_once(own: Join, head: int, caplog: pytest.LogCaptureFixture) -> None:
    first, second = FakeNode(head), FakeNode(head)
    assert isinstance(first.ask(node(own, 1)), Accepted)
    first.wire.send(Beat())
    first.wire.close()
    deadline = time.monotonic() + 1.0
    while "host1" not in caplog.text or "has closed its connection" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(second.ask(node(own, 1)), Accepted), "its place is free"
    second.wire.close()


@pytest.mark.slow
def test_a_node_that_does_not_hear_its_head_is_lost(
    own: Join, head: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network may drop what the head sends, and bring what the node has sent late, again and again."""
    monkeypatch.setattr("shardline.cluster.head.UNANSWERED", 2.0)
    deaf, well = FakeNode(head), FakeNode(head)
    assert isinstance(deaf.ask(node(own, 1)), Accepted)
    assert isinstance(well.ask(node(own, 2)), Accepted)
    deadline = time.monotonic() + 8.0
    while "node 1 (host1, 10.0.0.2) has not answered for 2 s" not in caplog.text:
        assert time.monotonic() < deadline
        deaf.wire.send(Beat())
        while (body := well.wire.receive(0.05)) is not None:
            message = msgspec.msgpack.decode(body, type=HeadMessage)
            if isinstance(message, Beat):
                well.wire.send(message)
    assert "host2, 10.0.0.3) has not" not in caplog.text
    for one in (deaf, well):
        one.wire.close()


@pytest.mark.parametrize("joined", [False, True])
def test_a_node_ends_if_it_cannot_read_its_head(own: Join, port: int, joined: bool) -> None:
    head = FakeHead(TOKEN, port)
    told: list[object] = []

    def answer() -> None:
        while not told or not isinstance(told[-1], Unfit):
            peer, body = head.receive()
            told.append(msgspec.msgpack.decode(body, type=NodeMessage))
            if len(told) == 1:
                if joined:
                    head.send(peer, Accepted("portable"))
                head.send(peer, {"type": "Launch", "deployment": "of another version"})

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    join = replace(node(own, 1), isas=("portable",))
    with pytest.raises(UnreadableMessage, match=rf"Shardline {__version__} on host1 cannot read; install the same"):
        Node(cluster_config(port), TOKEN, join).run()
    thread.join(5)
    head.close()
    assert isinstance(told[-1], Unfit), "the head names the node and the reason"


def test_a_join_that_nobody_answers_is_repeated(own: Join, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head process may hang after the handshake, its network may be cut, or another node may have its place."""
    monkeypatch.setattr("shardline.cluster.node.SILENCE", 0.3)
    monkeypatch.setattr("shardline.cluster.node._RETRY_SECONDS", 0.1)
    head = FakeHead(TOKEN, port)
    config = EngineConfig.from_options(nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=port)
    one = Node(config, TOKEN, node(own, 1))
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()

    def receive() -> tuple[FrameSocket, object]:
        peer, body = head.receive()
        return peer, msgspec.msgpack.decode(body, type=NodeMessage)

    first, message = receive()
    assert isinstance(message, Join)
    second, message = receive()
    assert isinstance(message, Join)
    assert head.awaits_end() is first is not second, "the node has given up the connection"
    head.send(second, Rejoin())
    third, message = receive()
    assert isinstance(message, Join)
    assert third is second
    one.ask_to_leave()
    thread.join(10)
    assert not thread.is_alive()
    head.close()


def test_a_process_that_a_node_cannot_start_is_told_to_the_far_end(
    own: Join, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node goes on with its other processes."""
    head = FakeHead(TOKEN, port)
    one = Node(cluster_config(port), TOKEN, node(own, 1))
    processes = ScarceProcesses()
    monkeypatch.setattr(one, "_processes", processes)
    monkeypatch.setattr(one, "_deployment", object())
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    peer, _ = head.receive()
    lacking, started = Stream(1, ENGINE, 2), Stream(0, ENGINE, 1)
    for message in (Accepted("portable"), StartStream(lacking), StartStream(started), StreamData(started, [b"first"])):
        head.send(peer, message)
    told: list[NodeMessage] = []
    while not any(isinstance(message, StreamEnded) for message in told):
        told.append(msgspec.msgpack.decode(head.receive()[1], type=NodeMessage))
    assert processes.started.wait(5.0)
    assert processes.ends[0].recv(9, socket.MSG_WAITALL)[4:] == b"first"
    head.send(peer, Shutdown(0, "the test is over"))
    thread.join(10)
    assert not thread.is_alive()
    [ended] = [message.stream for message in told if isinstance(message, StreamEnded)]
    [[words]] = [message.bodies for message in told if isinstance(message, StreamData)]
    assert ended == lacking
    assert b"engine 1 could not be started on" in words
    assert b"open files a process (RLIMIT_NOFILE); raise it" in words
    processes.ends[0].close()
    head.close()


class ScarceProcesses:
    """The processes of a node that has descriptors for engine 0 only; they start as sockets."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.started = threading.Event()

    def start_engine(self, deployment: object, stream: Stream) -> dict[Stream, socket.socket]:
        if stream.engine != 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        ours, theirs = socket.socketpair()
        self.ends.append(ours)
        self.started.set()
        return {stream: theirs}

    def beats(self) -> list[tuple[Stream, bytes]]:
        return []

    def check(self) -> None:
        pass

    def retire(self, stream: Stream) -> None:
        pass

    def end_all(self) -> None:
        pass
