"""Processes that live but do not answer: they are named in time, with and without requests; slow ones are spared."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.api.async_llm import AsyncLLM
from shardline.config.engine import EngineConfig
from shardline.engine import engine_watch
from shardline.engine.children import Child
from shardline.messages.engine import EngineFailed, EngineOutputs
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams
from tests.faults.processes import Replica, assert_all_end, clean_up

SLOW_STEPS = """
import time
from shardline.engine.executor.uni import UniExecutor

seconds = iter([0.7, 0.7, 0.7, 0.7, 60.0])
collect_results = UniExecutor.collect_results

def sleep_first(self):
    time.sleep(next(seconds))
    return collect_results(self)

UniExecutor.collect_results = sleep_first
from shardline.engine.process import main
main()
"""


@pytest.fixture
def replica() -> Iterator[Replica]:
    replica = Replica(step_timeout=2.0)
    yield replica
    clean_up(replica)


def count_open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_stopped_rank_is_named_without_a_request(replica: Replica) -> None:
    processes = [replica.engine_pid, *replica.worker_pids]
    time.sleep(0.8)  # a probe or two; what starting up still had open is closed
    open_files = [count_open_files(pid) for pid in processes]
    for _ in range(3):  # requests between probes
        replica.start_long_request(max_tokens=1)
        time.sleep(0.3)
    while not replica.messages.empty():
        assert isinstance(replica.messages.get(), EngineOutputs)
    time.sleep(0.6)
    assert replica.messages.empty(), "probes reach nobody but the client"
    deadline = time.monotonic() + 5
    while any(count_open_files(pid) > before for pid, before in zip(processes, open_files, strict=True)):
        assert time.monotonic() < deadline, "probes leave files open"
        time.sleep(0.05)  # a file that is read just now counts as open
    os.kill(replica.worker_pids[1], signal.SIGSTOP)
    message = replica.failure(timeout=2.0 + 1.0)
    assert "rank 1 (pp 0, tp 1)" in message
    assert f"pid {replica.worker_pids[1]}" in message
    assert "did not answer a probe within 1.5 s while idle" in message
    assert "rank 0" not in message
    assert_all_end(processes, within=10)


@pytest.mark.usefixtures("forked_engines")
def test_stopped_engines_of_one_rank_are_named_and_their_streams_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """One engine is in the middle of a stream, the other one is idle."""
    params = SamplingParams(max_tokens=300, ignore_eos=True, seed=5)

    async def run() -> None:
        llm = AsyncLLM(EngineConfig.from_options(model="demo", data_parallel_size=2, step_timeout=1.0))
        try:
            await llm.wait_ready()
            pids = [int(pid) for pid in re.findall(r"rank 0: .*pid (\d+)", "\n".join(llm.model.report))]
            stream = await llm.submit("Once", params)
            await anext(stream)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            [last async for last in stream]
            while not all(llm.replicas_alive()):  # the limit is that of the whole test
                await asyncio.sleep(0.05)
            for engine, pid in enumerate(pids):
                assert re.search(
                    rf"engine {engine} \(rank 0 \(pp 0, tp 0\) on \S+, pid {pid}\) has not answered for 1.9 s",
                    caplog.text,
                )
            undisturbed = await llm.submit("Once", params)
            [last async for last in undisturbed]
            assert stream.output.outputs == undisturbed.output.outputs
        finally:
            await llm.close()
        assert_all_end(pids, within=5)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.usefixtures("forked_engines")
def test_slow_steps_are_spared_and_one_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slow step is shorter than the deadline of 1 s; together they are much longer."""

    monkeypatch.setattr(Child, "code", lambda self, module: SLOW_STEPS)
    monkeypatch.setattr(engine_watch, "_GRACE", 0.5)
    replica = Replica(step_timeout=1.0, tensor_parallel_size=1)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        replica.client.add([Request(request_id="slow", prompt_token_ids=[100], sampling=sampling, streamed=False)])
        num_tokens = 0
        while isinstance(message := replica.messages.get(timeout=10), EngineOutputs):
            num_tokens += sum(len(output.token_ids) for output in message.outputs)
        assert isinstance(message, EngineFailed)
        assert message.suspicious
        assert 1.0 < message.stalled_for < 5.0
        assert "has not answered for 1.5 s: it is stopped or hangs in a step" in message.message
        # The fourth token waits for more to go with it.
        assert num_tokens in (3, 4)
        assert_all_end([replica.engine_pid], within=5)
    finally:
        clean_up(replica)
