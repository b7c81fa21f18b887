"""Ranks that fail or hang at once: the first cause is named, not those that only felt it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardline.channel import Channel
from shardline.config.topology import RankGrid
from shardline.deployment.machine import Machine
from shardline.engine import watchdog as load_watch
from shardline.engine.executor import failures, rank_processes
from shardline.engine.executor.base import ExecutorFailure
from shardline.engine.executor.failures import late_ranks
from shardline.engine.executor.multiprocess import MultiprocessExecutor
from shardline.engine.watchdog import LoadWatch
from shardline.messages.step import RankStep
from shardline.messages.worker import RankFailed, StoreGet, WorkerRequest
from shardline.runtime.runner import Runner
from shardline.segment.activity import Activity, read_activity
from shardline.segment.progress import ProgressBoard
from tests.deployment.machines import host, resolve_on
from tests.exactness.harness import make_requests, start_engine
from tests.models.checkpoints import make_checkpoint


class FakeRank:
    """A rank's process as the engine sees it."""

    def __init__(self, module: str, fds: Sequence[int], gpus: str | None = None) -> None:
        self.channel: Channel[WorkerRequest] = Channel(socket.socket(fileno=os.dup(fds[0])), WorkerRequest)  # type: ignore[arg-type]
        self.pid = 1000 + len(RANKS)
        self.code: int | None = None
        self.work = 0
        RANKS.append(self)

    def fail(self, message: str, *, consequence: bool) -> None:
        self.channel.send(RankFailed(RANKS.index(self), message, consequence=consequence))
        self.end(0)

    def end(self, code: int | float) -> bool:
        self.code = int(code)
        self.channel.close()
        return True

    def poll(self) -> int | None:
        return self.code

    def is_silent(self) -> bool:
        return False

    def describe_end(self) -> str:
        return f"ended with {self.code}"

    def activity(self) -> Activity:
        return Activity(self.work)


RANKS: list[FakeRank] = []


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[MultiprocessExecutor]:
    """An executor with four ranks of RANKS."""
    monkeypatch.setattr(rank_processes, "Child", FakeRank)
    monkeypatch.setattr(failures, "_SEARCH_SECONDS", 0.05)
    monkeypatch.setattr(load_watch, "STUCK_SECONDS", 0.6)
    RANKS.clear()
    executor = MultiprocessExecutor(resolve_on(Machine((host(),)), device="cpu", tensor_parallel_size=4), 0, {})
    executor._start_ranks()
    yield executor
    executor.close()


def test_a_rank_that_ends_at_once_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stillborn(FakeRank):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if len(RANKS) == 2:
                self.end(-9)

    monkeypatch.setattr(rank_processes, "Child", Stillborn)
    RANKS.clear()
    executor = MultiprocessExecutor(resolve_on(Machine((host(),)), device="cpu", tensor_parallel_size=4), 0, {})
    with pytest.raises(ExecutorFailure, match=r"tp 1\) on .*, pid 1001, ended with -9"):
        executor._start_ranks()
    executor.close()


def failure(executor: MultiprocessExecutor) -> str:
    with pytest.raises(ExecutorFailure) as caught:
        executor.check_ranks()
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "suspicious"), [(-9, False), (-15, False), (-11, True), (-6, True), (1, True)], ids=str
)
def test_a_crash_may_be_the_doing_of_what_ran_but_a_kill_is_not(
    executor: MultiprocessExecutor, code: int, suspicious: bool
) -> None:
    RANKS[0].fail("the connection is lost", consequence=True)
    RANKS[3].end(code)
    with pytest.raises(ExecutorFailure, match=r"rank 3") as caught:
        executor.check_ranks()
    assert caught.value.suspicious == suspicious


def test_an_error_of_a_step_may_be_the_doing_of_what_ran_but_a_lost_connection_is_not(
    executor: MultiprocessExecutor,
) -> None:
    RANKS[1].fail("the connection is lost", consequence=True)
    with pytest.raises(ExecutorFailure) as caught:
        executor.check_ranks()
    assert not caught.value.suspicious
    RANKS[2].fail("division by zero", consequence=False)
    with pytest.raises(ExecutorFailure, match="division by zero") as caught:
        executor.check_ranks()
    assert caught.value.suspicious


def test_an_error_is_named_rather_than_lost_connections(executor: MultiprocessExecutor) -> None:
    for rank in (0, 1, 3):
        RANKS[rank].fail("the connection is lost", consequence=True)
    RANKS[2].fail("it cannot go on", consequence=False)
    message = failure(executor)
    assert re.search(r"^rank 2 \(pp 0, tp 2\) on \S+, pid 1002, failed: it cannot go on$", message)


def test_killed_ranks_are_named_rather_than_those_that_abort_or_fail(executor: MultiprocessExecutor) -> None:
    RANKS[0].fail("NCCL: remote error", consequence=False)
    RANKS[1].end(-6)
    RANKS[2].end(-9)
    RANKS[3].end(-9)
    message = failure(executor)
    assert re.search(r"rank 2 .*pid 1002; rank 3 .*pid 1003: each ended with -9$", message)
    assert "rank 0" not in message
    assert "rank 1" not in message


def test_an_abort_is_named_rather_than_a_lost_connection(executor: MultiprocessExecutor) -> None:
    RANKS[0].fail("the connection is lost", consequence=True)
    RANKS[3].end(-6)
    assert "rank 3" in failure(executor)


def test_without_a_cause_the_first_message_is_named(executor: MultiprocessExecutor) -> None:
    RANKS[1].fail("the connection is lost", consequence=True)
    assert "rank 1 (pp 0, tp 1)" in failure(executor)


@pytest.mark.slow
def test_ranks_that_hang_in_loading_are_named_but_not_those_that_wait_for_them(
    executor: MultiprocessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_start_ranks", lambda: None)
    for rank in (0, 1, 3):
        RANKS[rank].channel.send(StoreGet("address/2"))
    began = time.monotonic()
    with pytest.raises(
        ExecutorFailure, match=r"^rank 2 \S+ \S+ tp 2\) on \S+, pid 1002: no progress in loading for 0.6 s"
    ):
        executor.start()
    assert time.monotonic() - began < 3


def test_slow_loading_is_told_from_loading_that_hangs() -> None:
    now = 0.0
    watch = LoadWatch(60.0, lambda: now)
    cpu, read = 0.0, 0
    for second in range(4000):
        now = second * 0.5
        read += second % 100 == 0  # a byte in 50 s
        assert watch.look([Activity(0, 7, 0.0), Activity(0, read, 0.0)]) == (second % 100 == 0)
        assert not watch.is_stuck
    for second in range(4000, 7000):  # a compiler computes, at most for half an hour
        now, cpu = second * 0.5, cpu + 0.4
        watch.look([Activity(0, 7, cpu), Activity(0, read, 0.0)])
        assert not watch.is_stuck
    now += 700.0  # this process was stopped
    watch.look([Activity(0, 7, cpu), Activity(0, read, 0.0)])
    assert not watch.is_stuck
    for _ in range(119):
        now += 0.5
        assert not watch.look([Activity(0, 7, cpu), Activity(0, read, 0.0)])
    assert not watch.is_stuck
    now += 0.5
    watch.look([Activity(0, 7, cpu), Activity(0, read, 0.0)])
    assert watch.is_stuck


def test_the_activity_of_a_process_counts_what_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100_000))
    before = read_activity(os.getpid(), 3)
    file.read_bytes()
    after = read_activity(os.getpid(), 3)
    assert after.work == before.work == 3
    assert after.num_bytes - before.num_bytes >= 100_000
    assert after.cpu_seconds >= before.cpu_seconds > 0
    assert read_activity(1 << 30, 1) == Activity(1)


def board(num_ranks: int) -> ProgressBoard:
    return ProgressBoard(memoryview(bytearray(ProgressBoard.num_bytes(num_ranks))), range(num_ranks))


def test_the_one_that_computes_while_others_wait() -> None:
    progress = board(3)
    for rank in (0, 2):
        progress.line(rank).waiting().__enter__()
    assert late_ranks(RankGrid(3, 1), progress.read(), 0) == [1]


def test_a_rank_that_finished_is_not_late() -> None:
    progress = board(2)
    progress.line(0).finish(4)
    assert late_ranks(RankGrid(2, 1), progress.read(), 4) == [1]
    assert late_ranks(RankGrid(2, 1), progress.read(), 5) == [0, 1]


def test_where_all_wait_the_one_that_arrived_least() -> None:
    progress = board(2)
    with progress.line(1).waiting():
        pass
    for rank in (0, 1):
        progress.line(rank).waiting().__enter__()
    assert late_ranks(RankGrid(2, 1), progress.read(), 0) == [0]


def test_later_stages_are_not_blamed_for_an_earlier_one() -> None:
    progress = board(4)
    for rank, arrivals in ((0, 5), (1, 4), (2, 1), (3, 1)):
        for _ in range(arrivals):
            progress.line(rank).waiting().__enter__()
    assert late_ranks(RankGrid(2, 2), progress.read(), 0) == [1]


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "hosts": "in-turns"}], ids=str)
def test_ranks_that_are_threads_do_not_wait_for_one_that_has_failed(
    layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits without Python's lock when the interpreter ends would abort the process."""
    engine, executor = start_engine(make_checkpoint("qwen3", tmp_path), **layout)
    run_step = Runner.run_step

    def fail(runner: Runner, step: RankStep) -> object:
        if runner._groups.place.rank == 0:
            raise OSError("the disk is broken")
        return run_step(runner, step)

    monkeypatch.setattr(Runner, "run_step", fail)
    engine.add_request(make_requests(256, 1)[0])
    with pytest.raises(ExecutorFailure, match="the disk is broken"):
        engine.step()
    engine.close()
    executor.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
