"""An engine whose ranks are two processes that share no memory, as on two hosts: the answers of a single rank."""

from __future__ import annotations

import queue
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shardline.channel import Channel
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor.base import ExecutorFailure
from shardline.engine.executor.threads import ThreadExecutor
from shardline.messages.step import RankStep
from shardline.messages.worker import RankReady, RunStep, StartWorker, StepDone, WorkerReply
from tests.exactness.harness import BLOCK_SIZE, Answer, golden, make_requests, run
from tests.models.checkpoints import make_checkpoint
from tests.runtime.parallel.other_host import start_worker

LAYOUTS: dict[str, tuple[str, dict[str, object]]] = {
    "tp2": ("qwen3", {"tensor_parallel_size": 2}),
    "pp2": ("qwen3", {"pipeline_parallel_size": 2}),
    "ep2": ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "dp2-ep": ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True}),
}

REQUESTS = make_requests(256, 6)


class OtherHost:
    """The process of the second host."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where ranks meet."""
        self.folder = folder
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.runtime.parallel.other_host", str(theirs.fileno()), str(folder)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.channel: Channel[WorkerReply] = Channel(ours, WorkerReply)  # type: ignore[arg-type]

    def close(self) -> None:
        self.channel.close()
        self.process.wait(10.0)


class TwoHosts(ThreadExecutor):
    """Rank 0 is a thread of this process, and rank 1 is the other host's."""

    def __init__(self, deployment: Deployment, other: OtherHost) -> None:
        super().__init__(deployment, 0)
        self._other = other
        self._nonce = secrets.token_bytes(32)

    def _run_rank(self, rank: int, _segments: object, _meeting: object, steps: queue.SimpleQueue) -> None:
        start = StartWorker(self._deployment, 0, rank, self._nonce)
        try:
            if rank == 0:
                self._run_here(start, steps)
            else:
                self._forward(start, steps)
        except Exception as error:  # carried to the engine's thread
            self._replies.put(error)

    def _run_here(self, start: StartWorker, steps: queue.SimpleQueue[RankStep | None]) -> None:
        worker, ready = start_worker(start, self._other.folder)
        self._replies.put(ready.report)
        while (step := steps.get()) is not None:
            result = worker.runner.run_step(step)
            if result is not None and start.rank in self._deployment.grid.drivers:
                self._replies.put((start.rank, result))

    def _forward(self, start: StartWorker, steps: queue.SimpleQueue[RankStep | None]) -> None:
        self._other.channel.send(start)
        ready = self._other.channel.receive(30.0)
        assert isinstance(ready, RankReady)
        self._replies.put(ready.report)
        while (step := steps.get()) is not None:
            self._other.channel.send(RunStep(step))
            if start.rank in self._deployment.grid.drivers:
                done = self._other.channel.receive(30.0)
                assert isinstance(done, StepDone)
                self._replies.put((start.rank, done.result))


@pytest.fixture(scope="module")
def other_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherHost]:
    other = OtherHost(tmp_path_factory.mktemp("store"))
    yield other
    other.close()


def start_engine(model: Path, options: dict[str, object], other: OtherHost) -> tuple[Engine, TwoHosts]:
    config = EngineConfig.from_options(
        model=str(model),
        dtype="bfloat16",
        distributed_executor_backend="threads",
        cpu_threads=1,
        step_timeout=60.0,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=32,
        **options,
    )
    setup = resolve_here(config)
    places = tuple(msgspec.structs.replace(place, host=rank) for rank, place in enumerate(setup.placements[0]))
    executor = TwoHosts(msgspec.structs.replace(setup, placements=(places,)), other)
    executor.start()
    return Engine(setup, executor), executor


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _ in LAYOUTS.values()}:
        make_checkpoint(family, folder / family)
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, dict[str, Answer]]:
    return {family.name: golden(family, "bfloat16", "none", "auto", REQUESTS) for family in models.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_answer(layout: str, other_host: OtherHost, models: Path, expected: dict[str, dict[str, Answer]]) -> None:
    family, parallel = LAYOUTS[layout]
    engine, executor = start_engine(models / family, parallel, other_host)
    answers = run(engine, REQUESTS, "staggered")
    executor.close()
    assert answers == expected[family]


def step_to_end(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def test_a_killed_peer_is_named_within_a_second(models: Path, tmp_path: Path) -> None:
    other = OtherHost(tmp_path)
    engine, executor = start_engine(models / "qwen3", {"tensor_parallel_size": 2}, other)
    engine.add_request(REQUESTS[0])
    engine.step()
    other.process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ExecutorFailure, match=r"ConnectionError: rank 1 \(pp 0, tp 1\) at 127.0.0.1"):
        step_to_end(engine)  # a step that was in flight may still end
    assert time.monotonic() - began < 1.0
    executor.close()
    other.close()
