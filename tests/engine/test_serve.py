"""What an engine does for its front, without an engine: it reads on, and no output is lost, doubled or reordered."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardline.channel import Channel
from shardline.engine.serve import HOLD_SECONDS, EngineServer, Outbox
from shardline.messages.engine import AddRequests, EngineMessage, FrontMessage
from shardline.messages.request import FinishReason, Request, SequenceOutput, TokenLogprobs
from shardline.sampling_params import SamplingParams


def test_a_flood_of_requests_does_not_keep_the_batch_waiting() -> None:
    """Messages are taken for some milliseconds, then the batch has a step; the others are taken after it."""
    ours, theirs = socket.socketpair()
    front: Channel[Any] = Channel(ours, EngineMessage)  # type: ignore[arg-type]
    channel: Channel[Any] = Channel(theirs, FrontMessage)  # type: ignore[arg-type]
    added: list[Request] = []

    def add_request(request: Request) -> None:
        time.sleep(0.001)
        added.append(request)

    engine: Any = SimpleNamespace(busy=True, add_request=add_request)
    server = EngineServer(channel, engine, SimpleNamespace())  # type: ignore[arg-type]
    for number in range(50):
        front.send(AddRequests([Request(request_id=f"r{number}", prompt_token_ids=[1], sampling=SamplingParams())]))
    assert server._take_messages()
    assert 0 < len(added) < 50
    engine.busy = False  # nothing waits
    assert server._take_messages()
    assert [request.request_id for request in added] == [f"r{number}" for number in range(50)]
    for one in (front, channel):
        one.close()


def request(name: str, *, streamed: bool) -> Request:
    return Request(request_id=name, prompt_token_ids=[1], sampling=SamplingParams(), streamed=streamed)


def output(name: str, *token_ids: int, end: FinishReason | None = None) -> SequenceOutput:
    logprobs = [TokenLogprobs(-0.5, 1, [token], [-0.5]) for token in token_ids]
    return SequenceOutput(name, list(token_ids), logprobs, [str(token) for token in token_ids], end)


def test_a_reader_waits_for_nothing() -> None:
    outbox = Outbox()
    outbox.expect_requests([request("read", streamed=True), request("batch", streamed=False)])
    assert outbox.put_outputs([output("read", 1)], 0.0)
    assert outbox.put_outputs([output("read", 2), output("batch", 7)], 0.0)
    assert outbox.put_outputs([output("read", 3), output("batch", 8)], 0.0)
    assert len(outbox.take_outputs()) == 2


def test_a_batch_gets_its_first_and_last_token_at_once() -> None:
    outbox = Outbox()
    outbox.expect_requests([request("batch", streamed=False)])
    assert outbox.put_outputs([output("batch", 1)], 10.0)
    assert outbox.take_outputs() == [output("batch", 1)]
    assert not outbox.put_outputs([output("batch", 2)], 10.01)
    assert not outbox.put_outputs([output("batch", 3)], 10.02)
    assert outbox.put_outputs([output("batch", 4, end="length")], 10.03)
    assert outbox.take_outputs() == [output("batch", 2, 3, 4, end="length")]
    assert outbox.take_outputs() == []


def test_nothing_is_held_for_long() -> None:
    outbox = Outbox()
    outbox.expect_requests([request("batch", streamed=False)])
    outbox.put_outputs([output("batch", 1)], 0.0)
    outbox.take_outputs()
    assert not outbox.put_outputs([], 5.0)
    assert not outbox.put_outputs([output("batch", 2)], 5.0)
    assert not outbox.put_outputs([], 5.0 + 0.9 * HOLD_SECONDS)
    assert outbox.put_outputs([], 5.0 + 1.1 * HOLD_SECONDS)


def test_errors_and_aborts_are_told_at_once() -> None:
    outbox = Outbox()
    outbox.expect_requests([request("batch", streamed=False)])
    outbox.put_outputs([output("batch", 1)], 0.0)
    outbox.take_outputs()
    outbox.put_outputs([output("batch", 2)], 0.0)
    failed = SequenceOutput("batch", [], finish_reason="error", error="NaN in layer 3")
    assert outbox.put_outputs([failed], 0.0)
    (told,) = outbox.take_outputs()
    assert (told.token_ids, told.digests, told.finish_reason, told.error) == ([2], ["2"], "error", "NaN in layer 3")
    assert told.logprobs is not None
    assert len(told.logprobs) == 1


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.floats(0.0, 0.1)), max_size=30),
    st.sets(st.sampled_from("abcd")),
)
def test_every_token_arrives_once_and_in_order(steps: list[tuple[set[str], float]], streamed: set[str]) -> None:
    outbox, sent, arrived, now = Outbox(), dict[str, list[int]](), dict[str, list[int]](), 0.0
    outbox.expect_requests([request(name, streamed=name in streamed) for name in "abcd"])

    def deliver() -> None:
        for one in outbox.take_outputs():
            assert one.digests == [str(token) for token in one.token_ids]
            arrived.setdefault(one.request_id, []).extend(one.token_ids)

    for number, (names, seconds) in enumerate(steps):
        now += seconds
        for name in names:
            sent.setdefault(name, []).append(number)
        if outbox.put_outputs([output(name, number) for name in sorted(names)], now):
            deliver()
        assert all(arrived.get(name) == sent.get(name) for name in streamed)
    deliver()
    assert arrived == sent
