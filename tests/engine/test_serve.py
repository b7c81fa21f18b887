"""What an engine does for its front, without an engine."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

from shardline.channel import Channel
from shardline.engine.serve import EngineServer
from shardline.messages.engine import AddRequests, EngineMessage, FrontMessage
from shardline.messages.request import Request
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
