"""Frames of local sockets are passed on whole, in order, however they come; ends are told once."""

from __future__ import annotations

import selectors
import socket
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.cluster.streams import Streams
from shardline.handshake import run_callbacks
from shardline.messages.node import Stream

STREAM = Stream(0, 1, 7)


class Relay:
    """Streams with one local end, and what they pass on."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.passed: list[bytes] = []
        self.ended: list[Stream] = []
        self.streams = Streams(self.selector, lambda _, bodies: self.passed.extend(bodies), self.ended.append)
        self.process, ours = socket.socketpair()
        self.streams.attach(STREAM, ours)

    def turn(self) -> None:
        run_callbacks(self.selector, 0.0)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def split_frames(data: bytes) -> list[bytes]:
    bodies = []
    while data:
        size = int.from_bytes(data[:4], "little")
        assert len(data) >= 4 + size, "a frame was cut"
        bodies.append(data[4 : 4 + size])
        data = data[4 + size :]
    return bodies


@settings(max_examples=50, deadline=None)
@given(bodies=st.lists(st.binary(max_size=40), max_size=6), cuts=st.lists(st.integers(1, 30), max_size=20))
def test_frames_are_passed_on_whole(bodies: list[bytes], cuts: list[int]) -> None:
    relay = Relay()
    data = b"".join(map(frame, bodies)) + b"\x05\x00\x00\x00cut"
    for cut in [*cuts, len(data)]:
        relay.process.sendall(data[:cut])
        data = data[cut:]
        relay.turn()
    relay.process.close()
    relay.turn()
    relay.turn()
    assert relay.passed == bodies
    assert relay.ended == [STREAM]
    assert STREAM not in relay.streams


def test_a_slow_reader_gets_everything_and_then_the_last_frame() -> None:
    relay = Relay()
    large = bytes(range(256)) * 8192
    for _ in range(3):
        relay.streams.write(STREAM, [large])
    relay.streams.close(STREAM, b"the end")
    relay.streams.write(STREAM, [b"too late"])
    received = b""
    relay.process.setblocking(False)
    while True:
        relay.turn()
        try:
            if not (data := relay.process.recv(1 << 16)):
                break
        except BlockingIOError:
            continue
        received += data
    relay.process.close()
    assert split_frames(received) == [large, large, large, b"the end"]
    assert relay.ended == [], "this side has ended it"
    assert relay.streams.all() == []
