"""Steps of a rank on another host: they have a connection of their own, and its end is explained by the rank's node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from shardline.channel import Channel, readable
from shardline.deployment.machine import Machine
from shardline.engine.executor import rank_processes, step_lines
from shardline.engine.executor.base import ExecutorFailure
from shardline.engine.executor.multiprocess import MultiprocessExecutor
from shardline.engine.watchdog import Verdict
from shardline.messages.control import Control, ControlDone
from shardline.messages.step import StepPlan, StepResult
from shardline.messages.worker import (
    AllocateCache,
    RankEnded,
    RankReady,
    RankReport,
    RankStarted,
    RunStep,
    StartWorker,
    StepDone,
    StepRequest,
    WorkerRequest,
)
from shardline.runtime.parallel.rendezvous import connect_to_engine
from tests.deployment.machines import host, resolve_on
from tests.engine.test_failures import RANKS, FakeRank

TWO_HOSTS = Machine(tuple(msgspec.structs.replace(host(name=name), address="127.0.0.1") for name in ("one", "two")))


def report(rank: int) -> RankReady:
    return RankReady(RankReport(rank, "two", 7, "CPU", "avx512", 1, 0, 0, 0.0))


class Remote:
    """Rank 1, on the other host."""

    def __init__(self, end: socket.socket) -> None:
        self.channel: Channel[WorkerRequest] = Channel(end, WorkerRequest)  # type: ignore[arg-type]

    def load(self) -> None:
        """Connect, and say that the rank is ready."""
        self.channel.send(RankStarted("two", 7))
        start = self.channel.receive(5.0)
        assert isinstance(start, StartWorker)
        self.socket, seal = connect_to_engine(start.step_address, start.nonce, 1, 5.0)
        self.line: Channel[StepRequest] = Channel(self.socket, StepRequest, seal)  # type: ignore[arg-type]
        self.channel.send(report(1))


class TwoHosts:
    """An executor whose second rank is a `Remote`."""

    def __init__(self) -> None:
        RANKS.clear()
        deployment = resolve_on(TWO_HOSTS, device="cpu", pipeline_parallel_size=2, nnodes=2, master_addr="127.0.0.1")
        stream, end = socket.socketpair()
        self.remote = Remote(end)
        self.executor = MultiprocessExecutor(deployment, 0, {1: stream.detach()})
        loading = threading.Thread(target=self.remote.load)
        loading.start()
        threading.Thread(target=self._load_first).start()
        assert [rank.rank for rank in self.executor.start()] == [0, 1]
        loading.join()

    def _load_first(self) -> None:
        while not RANKS:
            time.sleep(0.01)
        RANKS[0].channel.send(report(0))

    def failure(self) -> ExecutorFailure:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            try:
                self.executor.check_ranks()
            except ExecutorFailure as failure:
                return failure
            readable(self.executor.watched_fds(), 0.05)
        raise AssertionError("nothing failed")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setattr(rank_processes, "Child", FakeRank)
    monkeypatch.setattr(step_lines, "_LAST_WORDS_SECONDS", 0.3)
    hosts = TwoHosts()
    yield hosts
    hosts.executor.close()
    for channel in (hosts.remote.line, hosts.remote.channel, RANKS[0].channel):
        channel.close()


def test_steps_and_results_take_the_line(hosts: TwoHosts) -> None:
    remote = hosts.remote
    hosts.executor.submit_step([StepPlan(3, [], [], [])])
    step = remote.line.receive(5.0)
    assert isinstance(step, RunStep)
    assert step.step.plan.step_id == 3
    assert isinstance(RANKS[0].channel.receive(5.0), StartWorker)
    assert isinstance(RANKS[0].channel.receive(5.0), AllocateCache)
    assert isinstance(RANKS[0].channel.receive(5.0), RunStep)
    assert isinstance(remote.channel.receive(5.0), AllocateCache)
    assert not readable([remote.channel.fileno()], 0.1)
    remote.line.send(StepDone(StepResult(3, [])))
    assert hosts.executor.collect_results() == [StepResult(3, [])]


def test_probes_take_the_line(hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hosts.executor._watchdog, "check", lambda: Verdict.PROBE)
        hosts.executor.check_ranks()
    probe = hosts.remote.line.receive(5.0)
    assert isinstance(probe, Control)
    hosts.remote.line.send(ControlDone(probe.number))
    readable(hosts.executor.watched_fds(), 5.0)
    hosts.executor.check_ranks()
    assert hosts.executor.answers.missing(probe.number) == [0]


def test_a_line_s_end_is_explained_by_the_node(hosts: TwoHosts) -> None:
    hosts.remote.line.close()
    hosts.executor.submit_step([StepPlan(0, [], [], [])])
    hosts.executor.check_ranks()
    hosts.remote.channel.send(RankEnded("was killed by SIGKILL", -9))
    assert "rank 1 (pp 1, tp 0) on two, pid 7, was killed by SIGKILL at step 0" in str(hosts.failure())


def test_a_connection_that_is_lost_alone_is_named(hosts: TwoHosts) -> None:
    hosts.remote.line.shutdown()
    began = time.monotonic()
    failure = hosts.failure()
    assert "rank 1 (pp 1, tp 0) on two, pid 7, has lost its connection to the engine" in str(failure)
    assert failure.host_lost
    assert 0.3 <= time.monotonic() - began < 3.0


def test_an_altered_result_ends_the_line(hosts: TwoHosts) -> None:
    hosts.remote.socket.sendall(b"\x20\0\0\0" + b"x" * 32)
    assert "rank 1 (pp 1, tp 0)" in str(hosts.failure())


def test_nobody_listens_once_the_ranks_are_ready(hosts: TwoHosts) -> None:
    name, _, port = hosts.executor._lines.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((name, int(port)), timeout=1.0)
