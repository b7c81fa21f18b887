"""Sealed frames: the bodies come out as they went in, and anything else that a network could deliver is refused."""

from __future__ import annotations

import secrets
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.channel import Channel
from shardline.seal import Seal

BODIES = st.lists(st.binary(max_size=60), min_size=1, max_size=5)


class Word(msgspec.Struct, frozen=True):
    text: str


def ends() -> tuple[Seal, Seal]:
    key = secrets.token_bytes(32)
    return Seal(key, is_listener=True), Seal(key, is_listener=False)


@given(BODIES, BODIES)
def test_both_directions_deliver_what_was_sent(there: list[bytes], back: list[bytes]) -> None:
    first, second = ends()
    assert [second.open(frame) for frame in map(first.seal, there)] == there
    assert [first.open(frame) for frame in map(second.seal, back)] == back


@given(body=st.binary(max_size=40), data=st.data())
def test_no_bit_of_a_frame_may_change(body: bytes, data: st.DataObject) -> None:
    first, second = ends()
    frame = bytearray(first.seal(body))
    assert body == b"" or body not in frame or len(body) < 4
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(EOFError, match="altered"):
        second.open(frame)


@given(sent=st.permutations([0, 1, 2]) | st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_frames_open_in_their_order_only(sent: list[int]) -> None:
    first, second = ends()
    frames = [first.seal(b"%d" % number) for number in range(3)]
    for expected, number in enumerate(sent):
        if number != expected:
            with pytest.raises(EOFError):
                second.open(frames[number])
            return
        assert second.open(frames[number]) == b"%d" % number


def test_a_frame_does_not_come_back_to_its_sender_or_to_another_connection() -> None:
    first, _ = ends()
    _, other = ends()
    frame = first.seal(b"plan")
    for end in (first, other):
        with pytest.raises(EOFError):
            end.open(frame)


def test_a_channel_seals_what_it_sends_and_ends_at_a_stranger_s_frame() -> None:
    first, second = ends()
    ours, theirs = socket.socketpair()
    channel = Channel(ours, Word, first)
    peer = Channel(theirs, Word, second)
    peer.send(Word("a prompt"))
    assert b"a prompt" not in ours.recv(1 << 16, socket.MSG_PEEK)
    assert channel.receive() == Word("a prompt")
    channel.send(Word("x" * 100_000))
    assert peer.receive() == Word("x" * 100_000)
    Channel(theirs, Word).send(Word("not sealed"))
    with pytest.raises(EOFError, match="altered"):
        channel.receive()
    channel.close()
    peer.close()
