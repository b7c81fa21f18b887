"""The channel: whatever bytes arrive, the result is a whole message of the declared type or an error."""

from __future__ import annotations

import fcntl
import resource
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.channel import MAX_FRAME_BYTES, Channel, encode_message, readable
from shardline.messages.step import StepPlan, StepResult


class Word(msgspec.Struct, frozen=True):
    text: str


def pair() -> tuple[socket.socket, Channel[Word]]:
    ours, theirs = socket.socketpair()
    return ours, Channel(theirs, Word)


@given(words=st.lists(st.text(max_size=50), max_size=8), cut=st.integers(1, 7))
def test_messages_arrive_whole_and_in_order(words: list[str], cut: int) -> None:
    raw, channel = pair()
    bodies = [msgspec.msgpack.encode(Word(word)) for word in words]
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)

    def send() -> None:
        for start in range(0, len(stream), cut):
            raw.sendall(stream[start : start + cut])
        raw.close()

    thread = threading.Thread(target=send)
    thread.start()
    assert [channel.receive().text for _ in words] == words
    with pytest.raises(EOFError):
        channel.receive()
    thread.join()
    channel.close()


def test_a_peer_that_ends_within_a_frame_is_an_end_of_file() -> None:
    raw, channel = pair()
    raw.sendall(struct.pack("<I", 100) + b"half")
    raw.close()
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()


def test_silence_and_nonsense() -> None:
    raw, channel = pair()
    with pytest.raises(TimeoutError):
        channel.receive(timeout=0.01)
    raw.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(EOFError, match="announced"):
        channel.receive()
    raw.sendall(struct.pack("<I", 1) + msgspec.msgpack.encode(7))
    with pytest.raises(msgspec.ValidationError):
        channel.receive()
    raw.close()
    channel.close()


def test_plans_and_results_survive_the_wire() -> None:
    plan = StepPlan(3, [], [], [1, 2])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    result = StepResult(3, [], 0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result


@pytest.mark.parametrize("message", [Word("\ud800"), {"a": 2**70}, object()], ids=["surrogate", "big", "object"])
def test_what_cannot_be_sent_is_the_callers_error(message: object) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        encode_message(message)


def test_readiness_of_descriptors_above_1023() -> None:
    """A front with many connections gives its children such descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    ours, theirs = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 1024))
    try:
        assert readable([high.fileno()]) == readable([high.fileno()], -1.0) == []
        ours.sendall(b"x")
        assert readable([high.fileno(), theirs.fileno()], None) == [high.fileno(), theirs.fileno()]
        ours.close()
        assert readable([high.fileno()]) == [high.fileno()]
    finally:
        for sock in (ours, theirs, high):
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
