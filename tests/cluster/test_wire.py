"""The head's socket: who holds the token gets in, and nobody else."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from shardline.cluster import wire
from shardline.cluster.token import head_keys
from shardline.cluster.wire import HeadSocket, NodeSocket

TOKEN = "the-token-of-this-test-1"


@pytest.fixture
def head(port: int) -> Iterator[HeadSocket]:
    head = HeadSocket(TOKEN, "127.0.0.1", port)
    yield head
    head.close()


def becomes_true(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_messages_travel_both_ways(head: HeadSocket, port: int) -> None:
    node = NodeSocket(TOKEN, "127.0.0.1", port)
    node.socket.send(b"hello")
    identity, body = head.socket.recv_multipart()
    assert body == b"hello"
    head.socket.send_multipart([identity, b"welcome"])
    assert node.socket.recv() == b"welcome"
    assert not node.was_refused()
    with pytest.raises(zmq.ZMQError):
        head.socket.send_multipart([b"nobody", b"x"])
    node.close()


def test_another_token_is_refused_within_seconds_and_named_once(
    head: HeadSocket, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    head.watch_connections()
    node = NodeSocket("another-token-of-this-test", "127.0.0.1", port)
    node.socket.send(b"hello")
    assert becomes_true(node.was_refused)
    assert not head.socket.poll(100)
    list(head.ended_connections())
    assert caplog.text.count("a node is refused: its join token is not the head's") == 1
    node.close()


def test_a_head_that_is_stopped_refuses_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host accepts connections, and nobody answers the handshake."""
    monkeypatch.setattr(wire, "_HANDSHAKE_MILLISECONDS", 300)
    monkeypatch.setattr(wire, "_REFUSAL_SECONDS", 0.15)
    with socket.create_server(("127.0.0.1", port)):
        node = NodeSocket(TOKEN, "127.0.0.1", port)
        assert not becomes_true(node.was_refused, 1.5)
        node.close()


def test_a_program_of_another_protocol_is_refused(port: int) -> None:
    """libzmq gives such a connection up for good; sends that wait for it would wait forever."""
    with socket.create_server(("127.0.0.1", port)) as other:
        node = NodeSocket(TOKEN, "127.0.0.1", port)
        connection, _ = other.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
        assert becomes_true(node.was_refused)
        for _ in range(3):
            node.send("hello")
        connection.close()
        node.close()


def test_the_head_key_alone_opens_nothing(head: HeadSocket, port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Without an allow-list, libzmq accepts every client that knows the server's public key."""
    head.watch_connections()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = head_keys(TOKEN).public
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"hello")
        assert not head.socket.poll(500)
    list(head.ended_connections())
    assert "a node is refused" in caplog.text


def test_random_and_truncated_bytes_reach_nobody(head: HeadSocket, port: int) -> None:
    rng = random.Random(5)
    greeting = bytes.fromhex("ff00000000000000017f0300") + b"CURVE".ljust(20, b"\0") + bytes(32)
    for number in range(200):
        source = (f"127.0.1.{1 + number % 250}", 0)  # one address has too few ports
        with socket.create_connection(("127.0.0.1", port), source_address=source) as client:
            body = rng.randbytes(rng.randrange(1, 300))
            client.sendall(body if number % 2 else greeting[: rng.randrange(1, 65)] + body)
    assert not head.socket.poll(200)
    node = NodeSocket(TOKEN, "127.0.0.1", port)
    node.socket.send(b"hello")
    assert head.socket.poll(5000), "the head still serves its nodes"
    node.close()


def test_a_port_that_is_taken_is_named(head: HeadSocket, port: int) -> None:
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port}"):
        HeadSocket(TOKEN, "127.0.0.1", port)


def test_no_secret_reaches_children(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardline import env

    monkeypatch.setenv("SHARDLINE_JOIN_TOKEN", TOKEN)
    assert TOKEN not in env.for_children().values()
    assert os.environ["SHARDLINE_JOIN_TOKEN"] == TOKEN
