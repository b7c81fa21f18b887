"""A command that only this test knows travels through front, engine, every executor and ranks, and back."""

from __future__ import annotations

import queue
from typing import Any

import msgspec
import pytest

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.children import Child
from shardline.engine.client import EngineClient
from shardline.engine.executor.base import ControlAnswers
from shardline.engine.start import start_engine
from shardline.messages.control import Control, ControlDone, Probe
from shardline.messages.engine import EngineOutputs
from tests.engine.commands import Tell, code_with_command
from tests.engine.fake_worker import make_request

EXECUTORS: dict[str, dict[str, Any]] = {
    "uni": {},
    "threads": {"tensor_parallel_size": 2, "distributed_executor_backend": "threads"},
    "processes": {"tensor_parallel_size": 2},
}


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_command_that_only_a_test_knows_reaches_every_rank(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    monkeypatch.setattr(Child, "code", code_with_command)
    config = EngineConfig.from_options(model="demo", cpu_threads=1, max_model_len=256, **EXECUTORS[executor])
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = EngineClient(resolve_here(config), 0, messages.put, start_engine, b"")
    try:
        client.wait_ready(300)
        ranks = range(resolve_here(config).grid.world_size)
        expected = [[rank, "hello"] for rank in ranks]
        assert list(map(msgspec.msgpack.decode, client.control(Tell("hello")).result(60))) == expected
        client.add([make_request("r", [1, 2, 3], 40, ignore_eos=True)])
        between = client.control(Tell("hello"))
        with pytest.raises(ValueError, match="rank 0 refuses"):
            client.control(Tell("refuse")).result(60)
        assert list(map(msgspec.msgpack.decode, between.result(60))) == expected
        tokens = 0
        while tokens < 40:
            message = messages.get(timeout=60)
            assert isinstance(message, EngineOutputs), message
            tokens += sum(len(output.token_ids) for output in message.outputs)
        assert client.control(Probe()).result(60) == tuple(msgspec.msgpack.encode(None) for _ in ranks)
    finally:
        client.close()
    with pytest.raises(RuntimeError, match="engine 0 has ended"):
        client.control(Probe()).result(60)


def test_one_rank_that_refuses_is_the_answer_of_all() -> None:
    answers = ControlAnswers(3)
    answers.expect(Control.carry(1, Probe()))
    assert not answers.add(2, ControlDone(1, (b"c",)))
    assert not answers.add(1, ControlDone(1, error="no"))
    assert list(answers.missing(1)) == [0]
    assert answers.take() == []
    assert answers.add(0, ControlDone(1, error="never"))
    assert answers.take() == [ControlDone(1, error="never")]
    assert not answers.add(0, ControlDone(1, (b"a",)))
    assert answers.take() == []
