"""Routing over replicas, their deaths, and the limit on waiting requests."""

from __future__ import annotations

import queue
import random

import msgspec
import pytest

from shardline.api.engines import Client, EngineEvent
from shardline.api.errors import EngineDead, QueueFull
from shardline.api.replicas import Replicas
from shardline.api.requests import RequestBuilder
from shardline.config.engine import EngineConfig
from shardline.messages.engine import EngineFailed, EngineOutputs
from shardline.messages.kv_events import AllBlocksCleared, BlockStored
from shardline.messages.request import AdapterRef, Request, SequenceOutput
from shardline.messages.stats import EngineStats, ExpertLoad, merge_lockstep, merge_stats
from shardline.routing.router import CHUNK_TOKENS
from shardline.sampling_params import SamplingParams
from tests.api.fake_engine import FakeCluster, FakeEngineClient


def make(**options: object) -> tuple[Replicas, FakeCluster]:
    """Replicas whose engines never step; the test sends their reports."""
    cluster = FakeCluster()
    replicas = Replicas(EngineConfig.from_options(**options), lambda index, event: None, cluster)
    return replicas, cluster


def request(name: str, size: int = 3, n: int = 1) -> list[Request]:
    builder = RequestBuilder(None, 400, 100, (), random.Random(0))
    return builder.build_request(name, [5] * size, SamplingParams(n=n)).children


def finished(name: str) -> EngineOutputs:
    return EngineOutputs([SequenceOutput(name, [5], finish_reason="length")], EngineStats())


def started(name: str) -> EngineOutputs:
    return EngineOutputs([SequenceOutput(f"{name}-0", [5])], EngineStats())


def test_the_replica_with_the_least_to_do_gets_the_next_request() -> None:
    replicas, cluster = make(data_parallel_size=3)
    for name, size in (("a", 30), ("b", 3), ("c", 3), ("d", 3)):
        replicas.add_requests(request(name, size))
    assert [[r.request_id for r in client.added] for client in cluster.clients] == [["a-0"], ["b-0", "d-0"], ["c-0"]]
    replicas.handle_event(0, finished("a-0"))
    replicas.add_requests(request("e", n=3))
    assert [r.request_id for r in cluster.clients[0].added] == ["a-0", "e-0", "e-1", "e-2"]
    assert replicas.num_in_flight() == 6


def test_a_prompt_goes_where_it_is_cached_under_the_same_adapter() -> None:
    prompt, adapters = 3 * CHUNK_TOKENS, [AdapterRef(digest, "") for digest in "xyx"]
    for caching, homes in ((True, [0, 1, 0, 0, 1]), (False, [0, 1, 0, 1, 0])):
        replicas, cluster = make(data_parallel_size=2, enable_prefix_caching=caching, max_model_len=1000)
        builder = RequestBuilder(None, 1000, 1000, (), random.Random(0))
        for name, adapter in zip("abcde", [*adapters, adapters[0], adapters[1]], strict=True):
            [child] = builder.build_request(name, [5] * prompt, SamplingParams()).children
            replicas.add_requests([msgspec.structs.replace(child, adapter=adapter)])
            replicas.handle_event(0 if f"{name}-0" in cluster.clients[0].running else 1, started(name))
        where = {one.request_id: index for index, client in enumerate(cluster.clients) for one in client.added}
        assert [where[f"{name}-0"] for name in "abcde"] == homes


def test_the_router_policy_chooses_the_replica() -> None:
    replicas, cluster = make(data_parallel_size=3, router_policy="round_robin")
    for name in "abcd":
        replicas.add_requests(request(name))
        if name == "b":
            replicas.handle_event(1, finished("b-0"))
    assert [[r.request_id for r in client.added] for client in cluster.clients] == [["a-0", "d-0"], ["b-0"], ["c-0"]]


def test_a_replica_that_says_that_it_has_the_prompt_gets_it() -> None:
    replicas, cluster = make(data_parallel_size=2, router_policy="kv_aware")
    builder = RequestBuilder(None, 400, 1000, (), random.Random(0))

    def ask(name: str) -> int:
        replicas.add_requests(builder.build_request(name, [5] * 256, SamplingParams()).children)
        home = next(index for index, client in enumerate(cluster.clients) if f"{name}-0" in client.running)
        replicas.handle_event(home, finished(f"{name}-0"))
        return home

    stored = BlockStored(list(range(16)), None, [5] * 256, 16, None, "GPU", None)
    replicas.handle_event(1, EngineOutputs([], EngineStats(), kv_events=[stored]))
    assert [ask("a"), ask("b")] == [1, 1]
    replicas.handle_event(1, EngineOutputs([], EngineStats(), kv_events=[AllBlocksCleared()]))
    assert ask("c") == 0, "what was sent there does not count where the cache itself is known"


def test_aborts_go_where_the_request_runs() -> None:
    replicas, cluster = make(data_parallel_size=2)
    replicas.add_requests(request("a"))
    replicas.add_requests(request("b"))
    replicas.abort_requests(["b-0", "unknown"])
    assert [client.aborted for client in cluster.clients] == [[], ["b-0"]]
    replicas.abort_requests(["b-0"])
    assert cluster.clients[1].aborted == ["b-0"]
    assert replicas.num_in_flight() == 1


def test_with_exit_one_failure_ends_everything() -> None:
    replicas, _ = make(data_parallel_size=2, on_failure="exit")
    for name in "abc":
        replicas.add_requests(request(name))
    outputs = replicas.handle_event(0, EngineFailed("rank 1 was killed"))
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        (name, "error", "rank 1 was killed") for name in ("a-0", "c-0", "b-0")
    ]
    assert replicas.alive() == [False, False]
    assert replicas.dead_reason == "rank 1 was killed"
    assert replicas.num_in_flight() == 0
    with pytest.raises(EngineDead, match="rank 1 was killed"):
        replicas.add_requests(request("f"))


def test_a_failure_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    replicas, _ = make(on_failure="exit")
    replicas.add_requests(request("a"))
    replicas.handle_event(0, EngineFailed("rank 3 was killed"))
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == "replica 0 is lost with 1 choices; 0 left: rank 3 was killed"


def test_a_request_for_a_replica_that_has_just_died_ends_with_the_rest() -> None:
    replicas, cluster = make(on_failure="exit")
    cluster.clients[0]._dead = "gone"
    replicas.add_requests(request("a"))
    replicas.abort_requests([])
    assert [output.request_id for output in replicas.handle_event(0, EngineFailed("gone"))] == ["a-0"]


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, cluster = make()

    def refuse(_: object) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(cluster.clients[0], "add", refuse)
    with pytest.raises(ValueError, match="too large"):
        replicas.add_requests(request("a"))
    assert replicas.num_in_flight() == 0


def test_the_queue_is_bounded() -> None:
    replicas, _ = make(max_num_seqs=2, max_num_waiting=3)
    for index in range(5):
        replicas.add_requests(request(str(index)))
    assert replicas.num_waiting() == 3
    with pytest.raises(QueueFull, match="3 requests are already waiting"):
        replicas.add_requests(request("more"))
    replicas.add_requests(request("offline"), bounded=False)
    replicas.handle_event(0, finished("0-0"))
    replicas.handle_event(0, finished("1-0"))
    replicas.add_requests(request("again"))


def test_an_engine_of_replicas_in_lockstep_runs_more() -> None:
    replicas, _ = make(data_parallel_size=2, enable_expert_parallel=True, max_num_seqs=2, max_num_waiting=3)
    for index in range(5):
        replicas.add_requests(request(str(index)))
    assert replicas.num_waiting() == 1


def test_waiting_for_memory_counts_too() -> None:
    replicas, _ = make(max_num_seqs=64, max_num_waiting=3)
    for index in range(5):
        replicas.add_requests(request(str(index)))
    replicas.handle_event(0, EngineOutputs([], EngineStats(num_running=1, num_waiting=4)))
    assert replicas.num_waiting() == 4
    with pytest.raises(QueueFull):
        replicas.add_requests(request("more"))


def test_stats_are_per_replica_and_merged() -> None:
    replicas, _ = make(data_parallel_size=2, on_failure="exit")
    replicas.handle_event(0, EngineOutputs([], EngineStats(num_running=3, num_steps=7, kv_blocks_used=2)))
    replicas.handle_event(1, EngineOutputs([], EngineStats(num_running=1, step_seconds=0.5)))
    assert merge_stats(replicas.stats()) == EngineStats(num_running=4, num_steps=7, kv_blocks_used=2, step_seconds=0.5)
    replicas.handle_event(0, EngineFailed("x"))
    assert replicas.stats()[0] == EngineStats(num_steps=7), "what a failed replica has done stays, its gauges do not"


def test_replicas_in_lockstep_keep_their_own_stats() -> None:
    options = {"data_parallel_size": 2, "enable_expert_parallel": True, "on_failure": "exit"}
    replicas, _ = make(**options)
    assert replicas.stats() == [EngineStats(), EngineStats()]
    load = ExpertLoad([7, 1], [8], 1.5, 1.0)
    own = [
        EngineStats(num_running=3, num_steps=7, step_seconds=0.5, engine_seconds=0.25, experts=load),
        EngineStats(num_waiting=1, num_steps=7, engine_seconds=0.25),
    ]
    replicas.handle_event(0, EngineOutputs([], merge_lockstep(own)))
    first, second = replicas.stats()
    assert first == EngineStats(num_running=3, num_steps=7, step_seconds=0.5, engine_seconds=0.25, experts=load)
    assert second == EngineStats(num_waiting=1, num_steps=7, engine_seconds=0.25)
    replicas.handle_event(0, EngineFailed("x"))
    assert [stats.num_running + stats.num_waiting for stats in replicas.stats()] == [0, 0]
    assert [stats.num_steps for stats in replicas.stats()] == [7, 7]


@pytest.mark.parametrize(("error", "kind"), [(ValueError("bad tp"), ValueError), (RuntimeError("oom"), RuntimeError)])
def test_one_failed_start_ends_all(error: Exception, kind: type[Exception]) -> None:
    clients: list[FakeEngineClient] = []

    def connect(config: EngineConfig, index: int, on_message: object) -> Client:
        clients.append(FakeEngineClient(config, index, on_message, start_error=error if index else None))  # type: ignore[arg-type]
        return clients[-1]

    replicas = Replicas(EngineConfig.from_options(data_parallel_size=2), lambda index, event: None, connect)
    with pytest.raises(kind, match=str(error)):
        replicas.wait_ready()
    assert all(client.closed for client in clients)


def test_replicas_that_would_answer_differently_are_refused() -> None:
    def connect(config: EngineConfig, index: int, on_message: object) -> Client:
        return FakeEngineClient(config, index, on_message, fingerprint=f"isa-{index}")  # type: ignore[arg-type]

    replicas = Replicas(EngineConfig.from_options(data_parallel_size=2), lambda index, event: None, connect)
    with pytest.raises(RuntimeError, match=r"different answers .*isa-0.*isa-1"):
        replicas.wait_ready()


def test_events_carry_the_replicas_number() -> None:
    events: queue.SimpleQueue[tuple[int, EngineEvent]] = queue.SimpleQueue()
    cluster = FakeCluster()
    replicas = Replicas(
        EngineConfig.from_options(data_parallel_size=2), lambda index, event: events.put((index, event)), cluster
    )
    assert [one.report for one in replicas.wait_ready()] == [["replica 0 is up"], ["replica 1 is up"]]
    cluster.clients[1].die("x")
    assert events.get(timeout=5) == (1, EngineFailed("x"))
    replicas.close()
    replicas.close()
