"""The engine's process, without an engine: what the front is told."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from shardline.channel import Channel
from shardline.engine.process import EngineProcess
from shardline.messages.engine import EngineFailed, EngineMessage, FrontMessage, StartEngine


@pytest.mark.parametrize("front_ends", [False, True])
def test_an_end_of_file_elsewhere_is_a_failure_that_the_front_is_told(
    monkeypatch: pytest.MonkeyPatch, front_ends: bool
) -> None:
    """Only an end of the front's own channel ends the engine without a word."""
    ours, theirs = socket.socketpair()
    front: Channel[Any] = Channel(ours, EngineMessage)  # type: ignore[arg-type]
    channel: Channel[Any] = Channel(theirs, FrontMessage)  # type: ignore[arg-type]

    def read_checkpoint(host: int) -> None:
        if front_ends:
            front.close()
        raise EOFError("the checkpoint ends early")

    deployment = SimpleNamespace(role="", placements=[[SimpleNamespace(host=0)]], seen_from=read_checkpoint)
    monkeypatch.setattr(channel, "receive", lambda: StartEngine(deployment, 0, b""))  # type: ignore[arg-type]
    told: list[Exception] = []
    process = EngineProcess(channel)
    if front_ends:
        monkeypatch.setattr(process, "_tell", told.append)
    process.run()
    channel.close()
    if front_ends:
        assert told == []
    else:
        answer = front.receive()
        assert isinstance(answer, EngineFailed)
        assert "the checkpoint ends early" in answer.message
    front.close()
