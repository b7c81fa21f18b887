"""The head's socket: who holds the token gets in, and nobody else."""

from __future__ import annotations

import os
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from shardline import handshake
from shardline.cluster import wire
from shardline.cluster.wire import FrameSocket, NodeSocket, connect_to_head
from shardline.handshake import HandshakeRefused, connect
from tests.cluster.heads import FakeHead

TOKEN = "the-token-of-this-test-1"


@pytest.fixture
def head(port: int) -> Iterator[FakeHead]:
    head = FakeHead(TOKEN, port)
    yield head
    head.close()


def becomes_true(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_messages_travel_both_ways(head: FakeHead, port: int) -> None:
    node = NodeSocket(TOKEN, "127.0.0.1", port)
    node.send("hello")
    peer, body = head.receive()
    assert msgspec.msgpack.decode(body) == "hello"
    head.send(peer, "welcome")
    assert msgspec.msgpack.decode(node.receive(5.0) or b"") == "welcome"
    large = secrets.token_bytes(5 << 20)
    node.send(large)
    head.send(peer, large)
    assert msgspec.msgpack.decode(node.receive(5.0) or b"") == large
    # What has not left yet of the node's own message leaves while it waits for others.
    assert becomes_true(lambda: node.receive(0.02) is None and not head.received.empty())
    assert msgspec.msgpack.decode(head.receive()[1]) == large
    node.close()
    assert head.awaits_end() is peer


def test_what_was_sent_before_the_end_arrives(head: FakeHead, port: int) -> None:
    """Also if the node has sent something that nobody has read."""
    node = NodeSocket(TOKEN, "127.0.0.1", port)
    node.send("hello")
    peer, _ = head.receive()
    for number in range(100):
        node.send(number)
        head.send(peer, bytes(100_000))
    threading.Thread(target=head.close).start()
    messages = []
    while (body := node.receive(5.0)) is not None:
        messages.append(body)
    assert len(messages) == 100
    assert node.has_ended
    node.close()


def test_frames_are_encrypted(head: FakeHead, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    flush = FrameSocket._flush

    def note(self: FrameSocket) -> None:
        sent.extend(map(bytes, self._unsent))
        flush(self)

    monkeypatch.setattr(FrameSocket, "_flush", note)
    node = NodeSocket(TOKEN, "127.0.0.1", port)
    node.send("a prompt")
    head.receive()
    assert len(sent) == 1
    assert b"prompt" not in sent[0]
    node.close()


def test_another_token_is_refused_within_seconds_and_named_once(
    head: FakeHead, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    deadline = time.monotonic() + 5.0
    with pytest.raises(HandshakeRefused):
        connect_to_head("another-token-of-this-test", "127.0.0.1", port, lambda: time.monotonic() < deadline)
    assert time.monotonic() < deadline
    assert becomes_true(lambda: "is refused" in caplog.text)
    assert caplog.text.count("a node is refused: its join token is not the head's") == 1
    assert head.received.empty()


@pytest.mark.slow
def test_a_head_that_is_stopped_refuses_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host accepts connections, and nobody answers the handshake."""
    monkeypatch.setattr(wire, "_CONNECT_SECONDS", 0.3)
    deadline = time.monotonic() + 1.5
    with socket.create_server(("127.0.0.1", port)):
        assert connect_to_head(TOKEN, "127.0.0.1", port, lambda: time.monotonic() < deadline) is None


def test_a_program_of_another_protocol_is_refused(port: int) -> None:
    """It may take the magic bytes for a bad request, and keep the connection open."""

    def answer() -> None:
        for _ in range(wire._REFUSALS):
            connection, _ = other.accept()
            assert connection.recv(16, socket.MSG_WAITALL) == handshake._MAGIC
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connections.append(connection)

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", port)) as other:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeRefused, match="another program"):
            connect_to_head(TOKEN, "127.0.0.1", port, lambda: True)
        thread.join(5)
        for connection in connections:
            connection.close()


def test_a_program_that_plays_the_head_learns_and_gets_nothing(port: int) -> None:
    """It answers the greeting, but it has no token, and cannot turn the node's own proof round."""
    received = b""
    with socket.create_server(("127.0.0.1", port)) as other:

        def play() -> None:
            nonlocal received
            connection, _ = other.accept()
            with connection:
                connection.sendall(handshake._MAGIC + secrets.token_bytes(32))
                received = connection.recv(176, socket.MSG_WAITALL)
                connection.sendall(received[-32:])
                received += connection.recv(1 << 16)

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(HandshakeRefused, match="does not have the secret"):
            NodeSocket(TOKEN, "127.0.0.1", port)
        thread.join(5)
    assert len(received) == 176
    assert TOKEN.encode() not in received


def test_a_node_is_no_rank(head: FakeHead, port: int) -> None:
    """The proof covers what a connection is for."""
    with pytest.raises(HandshakeRefused):
        connect("127.0.0.1", port, wire._secret(TOKEN), "tensor: 1 to 0", 2.0)
    assert head.received.empty()


def test_two_connections_have_two_keys(port: int) -> None:
    """Who hears both, and learns the token later, has neither."""
    seals = []
    selector = selectors.DefaultSelector()
    listener = handshake.Listener(
        selector, "127.0.0.1", port, b"s" * 16, {"x"}.__contains__, lambda _, got: seals.append(got)
    )
    for _ in range(2):
        thread = threading.Thread(
            target=lambda: seals.append(connect("127.0.0.1", port, b"s" * 16, "x", 5.0)), daemon=True
        )
        thread.start()
        while thread.is_alive():
            handshake.run_callbacks(selector, 0.01)
        thread.join()
    listener.close()
    selector.close()
    frames = {connection.seal.seal(b"the same") for connection in seals}
    assert len(frames) == len(seals) == 4
    for connection in seals:
        connection.socket.close()


def test_random_and_truncated_bytes_reach_nobody(head: FakeHead, port: int) -> None:
    rng = random.Random(5)
    greeting = handshake._MAGIC + b"node".ljust(96, b"\0")
    for number in range(200):
        source = (f"127.0.1.{1 + number % 250}", 0)  # one address has too few ports
        with socket.create_connection(("127.0.0.1", port), source_address=source) as client:
            body = rng.randbytes(rng.randrange(1, 300))
            client.sendall(body if number % 2 else greeting[: rng.randrange(1, 113)] + body)
    node = NodeSocket(TOKEN, "127.0.0.1", port)
    node.send("hello")
    assert msgspec.msgpack.decode(head.receive()[1]) == "hello", "the head still serves its nodes"
    node.close()


def test_a_frame_that_is_too_large_ends_its_connection(
    head: FakeHead, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_MAX_BYTES", 1000)
    node = NodeSocket(TOKEN, "127.0.0.1", port)
    node.send(bytes(2000))
    assert node.receive(5.0) is None
    assert node.has_ended
    assert head.received.empty()


def test_a_port_that_is_taken_is_named(head: FakeHead, port: int) -> None:
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port}"):
        FakeHead(TOKEN, port)


def test_no_secret_reaches_children(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardline import env

    monkeypatch.setenv("SHARDLINE_JOIN_TOKEN", TOKEN)
    assert TOKEN not in env.for_children().values()
    assert os.environ["SHARDLINE_JOIN_TOKEN"] == TOKEN
