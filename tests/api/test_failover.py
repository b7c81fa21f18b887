"""Choices that outlive their replica: they go on elsewhere with the tokens that they have, or after a restart."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import aclosing

import pytest

from shardline.api import engines
from shardline.api.async_llm import AsyncLLM
from shardline.api.engines import Client, EngineEvent, EngineRestarted, RestartFailed
from shardline.api.errors import EngineDead, EngineRecovering
from shardline.api.failover import RESTART_WINDOW, RestartLimit
from shardline.api.llm import LLM
from shardline.api.outputs import RequestOutput
from shardline.api.quarantine import ONE_CUT, SUSPECT_AFTER, RunningChoice
from shardline.api.replicas import Replicas
from shardline.config.engine import EngineConfig
from shardline.messages.engine import EngineFailed, EngineOutputs, EngineReady
from shardline.messages.request import SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.sampling_params import SamplingParams
from tests.api.fake_engine import FakeCluster, FakeEngineClient, load_text
from tests.api.test_async_llm import on_loop
from tests.api.test_replicas import request
from tests.faults.test_streams_survive import known_fields

Connect = Callable[[EngineConfig, int, Callable[[EngineEvent], None]], Client]

MAX_RESTARTS = 5
"""The default of --max-restarts."""


class Cluster:
    """Replicas, and the events that restarts bring; what their engines compute by themselves is not used."""

    def __init__(self, connect: Connect | None = None, **options: object) -> None:
        self.fakes = FakeCluster()
        self.events: queue.SimpleQueue[tuple[int, EngineEvent]] = queue.SimpleQueue()
        config = EngineConfig.from_options(**options)
        self.replicas = Replicas(config, lambda *event: self.events.put(event), connect or self.fakes)
        self.replicas.wait_ready()

    def fail(self, index: int, message: str = "killed", *, host_lost: bool = False) -> list[SequenceOutput]:
        return list(self.replicas.handle_event(index, EngineFailed(message, host_lost=host_lost)))

    def pass_restart(self, kind: type[EngineEvent]) -> list[SequenceOutput]:
        """Waits for the end of a restart, and passes it on."""
        index, event = self.events.get(timeout=5)
        while isinstance(event, EngineOutputs):
            index, event = self.events.get(timeout=5)
        assert isinstance(event, kind)
        return list(self.replicas.handle_event(index, event))

    def generate(self, index: int, name: str, *tokens: int) -> None:
        event = EngineOutputs([SequenceOutput(name, list(tokens))], EngineStats(num_steps=1))
        self.replicas.handle_event(index, event)


def test_choices_go_on_at_the_other_replica_with_their_tokens() -> None:
    cluster = Cluster(data_parallel_size=2)
    replicas = cluster.replicas
    for name in "abc":
        replicas.add_requests(request(name))
    cluster.generate(0, "a-0", 7)
    cluster.generate(0, "a-0", 8, 9)
    assert cluster.fail(0) == []
    assert replicas.alive() == [False, True]
    moved = {added.request_id: added.output_token_ids for added in cluster.fakes.clients[1].added}
    assert moved == {"b-0": [], "a-0": [7, 8, 9], "c-0": []}
    replicas.add_requests(request("d"))
    assert len(cluster.fakes.clients[1].added) == 4
    cluster.pass_restart(EngineRestarted)
    assert replicas.alive() == [True, True]
    assert cluster.fakes.clients[0].closed
    replicas.add_requests(request("e"))
    assert [added.request_id for added in cluster.fakes.clients[2].added] == ["e-0"]


def test_without_another_replica_choices_wait_for_the_restart() -> None:
    cluster = Cluster()
    replicas = cluster.replicas
    for name in "abx":
        replicas.add_requests(request(name))
    cluster.generate(0, "a-0", 7)
    assert cluster.fail(0) == []
    assert replicas.dead_reason == ""
    with pytest.raises(EngineRecovering, match="being restarted"):
        replicas.add_requests(request("c"))
    replicas.add_requests(request("d"), bounded=False)
    replicas.abort_requests(["x-0"])
    assert replicas.num_in_flight() == 3
    cluster.pass_restart(EngineRestarted)
    added = cluster.fakes.clients[1].added
    assert [(one.request_id, one.output_token_ids) for one in added] == [("a-0", [7]), ("b-0", []), ("d-0", [])]
    assert replicas.num_in_flight() == 3


def test_counters_outlive_an_engine() -> None:
    cluster = Cluster()
    cluster.replicas.handle_event(0, EngineOutputs([], EngineStats(num_running=2, num_steps=5, kv_blocks_total=9)))
    cluster.fail(0)
    assert cluster.replicas.stats() == [EngineStats(num_steps=5, kv_blocks_total=9)]
    cluster.pass_restart(EngineRestarted)
    cluster.replicas.handle_event(0, EngineOutputs([], EngineStats(num_running=1, num_steps=2, kv_blocks_total=8)))
    assert cluster.replicas.stats() == [EngineStats(num_running=1, num_steps=7, kv_blocks_total=8)]


def test_a_choice_that_is_there_at_every_failure_ends() -> None:
    cluster = Cluster()
    cluster.replicas.add_requests(request("poison"))
    for _ in range(SUSPECT_AFTER):
        assert cluster.fail(0) == []
        cluster.pass_restart(EngineRestarted)
    [output] = cluster.fail(0, "rank 1 was killed")
    assert output.finish_reason == "error"
    words = "this request was running at an earlier failure, and alone at this one; it is not tried again"
    assert output.error == f"rank 1 was killed ({words})"
    cluster.pass_restart(EngineRestarted)
    assert cluster.replicas.num_in_flight() == 0


def test_one_cut_is_one_failure_of_a_choice() -> None:
    """A cut takes two replicas away, and one of them again while it heals."""
    cluster = Cluster(data_parallel_size=3)
    cluster.replicas.add_requests(request("a"))
    for index in (0, 1, 2):
        assert cluster.fail(index, host_lost=True) == []
    choice = RunningChoice(request("b")[0])
    for now, expected in ((100.0, 1), (100.1, 1), (100.0 + ONE_CUT, 2), (101.0 + ONE_CUT, 2)):
        choice.note_failure(0, now, "the node is away", host_lost=True)
        assert len(choice.failures) == expected
        assert choice.is_suspect == (expected >= SUSPECT_AFTER)
    choice.note_failure(0, 102.0 + ONE_CUT, "the engine has ended")
    assert len(choice.failures) == 3


def test_a_replica_that_fails_too_often_stays_down() -> None:
    cluster = Cluster()
    for _ in range(MAX_RESTARTS):
        cluster.fail(0)
        cluster.pass_restart(EngineRestarted)
    cluster.replicas.add_requests(request("last"))
    [output] = cluster.fail(0, "killed once more")
    assert (output.request_id, output.finish_reason, output.error) == ("last-0", "error", "killed once more")
    assert cluster.replicas.dead_reason == "killed once more"
    with pytest.raises(EngineDead, match="killed once more"):
        cluster.replicas.add_requests(request("more"), bounded=False)


def test_restarts_are_counted_over_five_minutes() -> None:
    now = 1000.0
    limit = RestartLimit(MAX_RESTARTS, lambda: now)
    assert [limit.allow_restart() for _ in range(MAX_RESTARTS + 1)] == [True] * MAX_RESTARTS + [False]
    now += RESTART_WINDOW + 1
    assert limit.allow_restart()


def test_an_engine_that_would_answer_differently_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_FIRST_PAUSE", 0.01)
    starts: list[FakeEngineClient] = []

    def connect(config: EngineConfig, index: int, on_message: Callable[[EngineEvent], None]) -> Client:
        starts.append(FakeEngineClient(config, index, on_message, fingerprint=f"weights {len(starts)}"))
        return starts[-1]

    cluster = Cluster(connect)
    cluster.replicas.add_requests(request("a"))
    cluster.fail(0, "killed")
    for _ in range(MAX_RESTARTS - 1):
        assert cluster.pass_restart(RestartFailed) == []
    [output] = cluster.pass_restart(RestartFailed)
    assert (output.finish_reason, output.error) == ("error", "killed")
    assert all(client.closed for client in starts)


def test_a_start_during_which_a_host_is_lost_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no failure of the replica, whose restarts are bounded."""
    present = iter([False, False, True])
    starts: list[FakeEngineClient] = []

    class Hosts:
        waits = 0

        def await_hosts(self, engine: int) -> None:
            self.waits += 1

        def has_hosts(self, engine: int) -> bool:
            return next(present)

    def connect(config: EngineConfig, index: int, on_message: Callable[[EngineEvent], None]) -> Client:
        if starts:
            raise OSError("its host is away")
        starts.append(FakeEngineClient(config, index, on_message))
        return starts[-1]

    cluster, hosts = Cluster(connect), Hosts()
    monkeypatch.setattr(cluster.replicas._engines, "_cluster", hosts)
    cluster.fail(0)
    index, event = cluster.events.get(timeout=5)
    assert (index, event) == (0, RestartFailed("its host is away"))
    assert hosts.waits == 3


def test_closing_ends_a_restart() -> None:
    starts: list[FakeEngineClient] = []

    class NeverReady(FakeEngineClient):
        def wait_ready(self, timeout: float | None = None) -> object:  # type: ignore[override]
            time.sleep(timeout or 0)
            raise TimeoutError

    def connect(config: EngineConfig, index: int, on_message: Callable[[EngineEvent], None]) -> Client:
        kind = NeverReady if starts else FakeEngineClient
        starts.append(kind(config, index, on_message))
        return starts[-1]

    cluster = Cluster(connect)
    cluster.fail(0)
    while len(starts) < 2:
        time.sleep(0.01)
    cluster.replicas.close()
    assert all(client.closed for client in starts)
    index, event = cluster.events.get(timeout=5)
    assert (index, event) == (0, RestartFailed("the engine was closed while it started"))
    assert all(not thread.name.startswith("restart-") or not thread.is_alive() for thread in threading.enumerate())


PARAMS = [
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=30, n=2, logprobs=1),
    SamplingParams(max_tokens=40, stop="Q"),
    SamplingParams(max_tokens=15, receipt=True, seed=3),
]


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
    stream = await llm.submit(prompt, params)
    async with aclosing(stream):
        async for _ in stream:
            pass
    return stream.output


def contents(outputs: list[RequestOutput]) -> list[object]:
    return [known_fields(output.outputs) for output in outputs]


@pytest.mark.parametrize("suspicious", [False, True], ids=["killed", "hanging"])
@pytest.mark.parametrize("num_replicas", [1, 2])
@on_loop
async def test_streams_outlive_replicas_and_are_the_same(num_replicas: int, suspicious: bool) -> None:
    """Every choice is served by several engines, one after another; if a step hung, by one alone for a while."""

    async def run(kills: int) -> list[object]:
        cluster = FakeCluster()
        config = EngineConfig.from_options(data_parallel_size=num_replicas)
        llm = AsyncLLM(config, connect=cluster, load_text=load_text)
        try:
            await llm.wait_ready()
            for client in cluster.clients if kills else []:
                client.paused.set()
            tasks = [asyncio.create_task(collect(llm, f"dog {index}", p)) for index, p in enumerate(PARAMS)]
            for _ in range(kills):
                await asyncio.sleep(0.02)
                victim = cluster.clients[-1]
                victim.paused.clear()
                await asyncio.sleep(0.004)
                started = len(cluster.clients)
                await asyncio.to_thread(victim.die, "rank 0 was killed", suspicious=suspicious)
                while len(cluster.clients) == started or not all(llm.replicas_alive()):
                    await asyncio.sleep(0.001)
                for client in cluster.clients if suspicious else []:
                    client.paused.clear()
                while llm._replicas._placement.quarantine.replica is not None:
                    await asyncio.sleep(0.001)
            for client in cluster.clients:
                client.paused.clear()
            outputs = [await task for task in tasks]
            assert llm.state() == "ready"
            return contents(outputs)
        finally:
            await llm.close()

    undisturbed = await run(0)
    assert await run(2) == undisturbed


@on_loop
async def test_while_nothing_runs_new_requests_are_refused() -> None:
    gate = threading.Event()
    starts: list[FakeEngineClient] = []

    class Late(FakeEngineClient):
        def wait_ready(self, timeout: float | None = None) -> EngineReady:
            if not gate.wait(timeout):
                raise TimeoutError
            return super().wait_ready(timeout)

    def connect(config: EngineConfig, index: int, on_message: Callable[[EngineEvent], None]) -> Client:
        starts.append((Late if starts else FakeEngineClient)(config, index, on_message))
        return starts[-1]

    llm = AsyncLLM(EngineConfig(), connect=connect, load_text=load_text)
    try:
        await llm.wait_ready()
        await asyncio.to_thread(starts[0].die, "rank 0 was killed")
        while llm.state() == "ready":
            await asyncio.sleep(0.001)
        assert llm.state() == "recovering"
        assert llm.dead_reason == ""
        with pytest.raises(EngineRecovering, match="being restarted"):
            await llm.submit("dog", SamplingParams())
        gate.set()
        while llm.state() == "recovering":
            await asyncio.sleep(0.001)
        assert (await collect(llm, "dog", SamplingParams(max_tokens=3))).outputs[0].finish_reason == "length"
    finally:
        await llm.close()


def test_a_batch_outlives_its_engine() -> None:
    prompts, params = ["a", "b", "c"], SamplingParams(max_tokens=20)
    with LLM.from_config(EngineConfig(), connect=FakeCluster(), load_text=load_text) as llm:
        expected = contents(llm.generate(prompts, params, use_tqdm=False))
    cluster = FakeCluster()
    with LLM.from_config(EngineConfig(), connect=cluster, load_text=load_text) as llm:
        threading.Timer(0.005, lambda: cluster.clients[0].die("rank 0 was killed")).start()
        assert contents(llm.generate(prompts, params, use_tqdm=False)) == expected
