"""Workloads in virtual time: the real scheduler, many steps at once, routers, and what is reported."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from shardline.cli.main import main
from shardline.deployment.deployment import StepLimits
from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Demand
from shardline.planner.search import Fixed, search
from shardline.planner.simulation.group import Worker
from shardline.planner.simulation.replica import Outcome, ReplicaSetup, SimulatedReplica
from shardline.planner.simulation.report import Simulation, progress_bar, show_progress
from shardline.planner.simulation.simulate import replica_setup, simulate
from shardline.planner.simulation.workload import Prefixes, SimulatedRequest, poisson, read_trace

DEMAND = Demand(2048, input_len=512, output_len=64)


@functools.cache
def setup(model: str = "meta-llama/Llama-3.1-8B-Instruct", pipeline: int = 1) -> ReplicaSetup:
    cluster = parse_cluster("2xH100", known_gpus())
    fixed = Fixed(tensor=1, pipeline=pipeline, data=1, weights="bf16", kv="auto")
    found = search(find_model(model), cluster, DEMAND, "cost", None, fixed)
    return replica_setup(found, found.options[0])


REQUESTS = st.lists(
    st.builds(
        lambda gap, prefix, shared, own, out: (gap, ((-1 - prefix, shared), (1, 1), (0, own)), out),
        st.sampled_from((0.0, 0.0001, 0.02, 0.3, 2.0)),
        st.integers(0, 2),
        st.sampled_from((0, 16, 40)),
        st.integers(0, 90),
        st.integers(1, 120),
    ),
    min_size=1,
    max_size=14,
)


def run(one: ReplicaSetup, requests: list[SimulatedRequest]) -> Outcome:
    replica = SimulatedReplica(one, 0.1)
    for number, request in enumerate(requests):
        replica.add(number, request)
    replica.advance()
    return replica.outcome()


@settings(max_examples=50, deadline=None)
@given(
    REQUESTS,
    st.sampled_from(("meta-llama/Llama-3.1-8B-Instruct", "google/gemma-4-31B-it")),
    st.integers(1, 8),
    st.integers(18, 60),
    st.booleans(),
    st.sampled_from((48, 2048)),
)
def test_many_steps_at_once_change_nothing(
    drawn: list[tuple[float, tuple[tuple[int, int], ...], int]],
    model: str,
    running: int,
    blocks: int,
    caching: bool,
    budget: int,
) -> None:
    """Requests that share prefixes and lack blocks end at the same times, with as many preemptions."""
    now, requests = 0.0, []
    for gap, prompt, out in drawn:
        now += gap
        requests.append(SimulatedRequest(now, prompt, out))
    whole = setup(model)
    small = dataclasses.replace(
        whole,
        num_blocks=blocks * len(whole.cache.groups),
        limits=StepLimits(running, budget),
        cache=msgspec.structs.replace(whole.cache, prefix_caching=caching),
    )
    single, skipping = run(dataclasses.replace(small, skips=False), requests), run(small, requests)
    assert np.frombuffer(skipping.times) == pytest.approx(np.frombuffer(single.times), rel=1e-9)
    assert skipping.num_steps == single.num_steps
    assert single.num_skipped == 0
    for name in ("num_failed", "num_preemptions", "prefix_queries", "prefix_hits"):
        assert getattr(skipping, name) == getattr(single, name), name


def test_most_decode_steps_are_done_at_once() -> None:
    requests = list(poisson(4.0, 60, 512, 64))
    outcome = run(setup(), requests)
    assert len(np.frombuffer(outcome.times)) == 4 * 60
    assert outcome.num_skipped > 0.6 * outcome.num_steps
    assert sum(outcome.kv_use.values()) == pytest.approx(sum(run(plain(), requests).kv_use.values()), rel=0.02)


def plain() -> ReplicaSetup:
    return dataclasses.replace(setup(), skips=False)


def test_pipelines_have_a_step_in_each_stage() -> None:
    requests = list(poisson(float("inf"), 64, 512, 64))
    one, two = (simulate(setup(pipeline=stages), requests, DEMAND) for stages in (1, 2))
    assert one.num_requests == two.num_requests == 64
    assert 1.3 < two.output_tokens_per_second / one.output_tokens_per_second < 2.2


def test_a_simulation_agrees_with_the_formula() -> None:
    """32 requests that are always there have the TPOT that the search computes for them."""
    demand = dataclasses.replace(DEMAND, running=32)
    fixed = Fixed(tensor=1, pipeline=1, data=1, weights="bf16", kv="auto")
    cluster = parse_cluster("1xH100", known_gpus())
    found = search(find_model("meta-llama/Llama-3.1-8B-Instruct"), cluster, demand, "cost", None, fixed)
    speed = found.options[0].speed
    assert speed is not None
    limited = dataclasses.replace(setup(), limits=StepLimits(32, 2048))
    result = simulate(limited, poisson(float("inf"), 200, 512, 64), demand)
    assert result.tpot[50] == pytest.approx(speed.tpot.p50, rel=0.1)


def test_a_lone_request_waits_for_the_front_once() -> None:
    requests = [SimulatedRequest(0.0, ((1, 512),), 64)]
    arrival, first, last, _ = np.frombuffer(run(setup(), requests).times)
    found = simulate(setup(), requests, DEMAND)
    assert found.ttft[50] == pytest.approx(first - arrival)
    assert found.latency[50] == pytest.approx(last - arrival)


def route(policy: str) -> Simulation:
    few_blocks = dataclasses.replace(setup(), num_blocks=200)
    requests = poisson(20.0, 120, 512, 8, Prefixes(448, 8))
    return simulate(few_blocks, requests, DEMAND, num_replicas=4, policy=policy, progress=tqdm(total=120, disable=True))


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "cache_aware"])
def test_processes_change_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = route(policy)
    monkeypatch.setattr("shardline.planner.simulation.simulate._WORTH_PROCESSES", 1)
    monkeypatch.setattr("shardline.planner.simulation.simulate.allowed_cpus", lambda: 3)
    assert route(policy) == alone


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for delay, stream, shown in ((0.0, Terminal(), True), (60.0, Terminal(), False), (0.0, io.StringIO(), False)):
        monkeypatch.setattr("shardline.planner.simulation.report._SHOW_AFTER", delay)
        bar = progress_bar(4000, stream)
        bar.mininterval = 0.0
        show_progress(bar, 1000, 7.5)
        bar.close()
        assert ("simulating:  25%" in stream.getvalue()) == shown
        assert ("1000/4000" in stream.getvalue() and "at 7.5 s" in stream.getvalue()) == shown


def test_routers_with_prefixes() -> None:
    """Prompts with common beginnings are computed less often if equal ones go to one replica."""
    found = {policy: route(policy) for policy in ("round_robin", "least_loaded", "prefix_hash", "cache_aware")}
    assert all(one.num_requests == 120 for one in found.values())
    assert found["cache_aware"].prefix_hit_rate > found["round_robin"].prefix_hit_rate + 0.1
    assert found["prefix_hash"].prefix_hit_rate > found["round_robin"].prefix_hit_rate + 0.1


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 1.5, "input_len": 700, "output_len": 3, "prefix": "system", "prefix_len": 600}\n\n'
        '{"timestamp": 500, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8]}\n'
        '{"arrival": 2, "input_len": 650, "output_len": 1, "prefix": "system", "prefix_len": 600}\n'
    )
    requests = read_trace(path)
    assert [(one.arrival, one.input_len, one.output_len) for one in requests] == [
        (0.5, 1100, 4),
        (1.5, 700, 3),
        (2.0, 650, 1),
    ]
    assert all(len(one.token_ids()) == one.input_len for one in requests)
    assert requests[1].token_ids()[:600] == requests[2].token_ids()[:600]
    assert requests[1].token_ids()[600] != requests[2].token_ids()[600]
    path.write_text('{"arrival": 0, "input_len": 7, "output_len": 3}\n{"arrival": 0, "output_len": 3}\n')
    with pytest.raises(ValueError, match=r"line 2: 'input_len' is missing"):
        read_trace(path)


def test_a_trace_states_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival": 0.5 * one, "input_len": 4000 + 100 * one, "output_len": 50} for one in range(60)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = ["plan", "meta-llama/Llama-3.1-8B-Instruct", "--gpus", "1xH100", "--simulate", "--trace", str(trace)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["layouts"][found["recommended"]]
    assert best["output_tok_s"]["p50"] == pytest.approx(2 * 50, rel=0.01), "its mean rate"
    assert "--max-model-len 9950 " in found["commands"]["shardline"] + " ", "its longest request"
    assert found["simulation"]["too_long"] == 0
    assert main([*words, "--num-prompts", "10", "--max-model-len", "4500", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["simulation"]
    assert (found["requests"], found["too_long"]) == (5, 5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"arrival": 1, "input_len": 1e9, "output_len": 1}', "lengths must be at most 10,000,000 tokens"),
        ('{"arrival": 1, "input_len": 10, "output_len": 1, "hash_ids": 4}', "hash_ids must be a list"),
        ('{"arrival": 1, "input_len": 9, "output_len": 1, "prefix": "a", "prefix_len": -4}', "must be from 0 to"),
    ],
)
def test_broken_traces_name_the_line(tmp_path: Path, line: str, says: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2: .*{says}"):
        read_trace(trace)


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "meta-llama/Llama-3.1-8B-Instruct", "--gpus", "2xH100", "-tp", "1", "-dp", "2", "--simulate"]
    words += ["--num-prompts", "50", "--rate", "20", "--ttft", "1s", "--tpot", "50ms", "--output-len", "32"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["simulation"]
    assert found["requests"] == 50
    assert found["replicas"] == 2
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"]
    assert 0 < found["goodput_per_s"] <= found["requests_per_s"]
    assert found["kv_use"]
    assert main(words) == 0
    assert "simulated: 50 requests" in capsys.readouterr().out
    assert main([*words[:8], "--simulate", "--num-prompts", "300", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["simulation"]["kv_use"]) < 400, "without a rate too"
    assert main([*words, "--num-prompts", "400", "--rate", "1e5", "--replicas", "400", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["simulation"]["kv_use"]) > 10, "the resolution follows the replicas"
    assert main([*words, "--num-prompts", "0"]) == 2
    assert "--num-prompts must be at least 1" in capsys.readouterr().err
    assert main([*words, "--trace", "/nothing.jsonl"]) == 2
    assert "--trace /nothing.jsonl cannot be read" in capsys.readouterr().err


def test_a_process_that_fails_ends_the_simulation(capfd: pytest.CaptureFixture[str]) -> None:
    worker = Worker(lambda connection: connection.send_bytes(b"x" * (1 // len(connection.recv_bytes()))))
    worker.send(b"y")
    assert worker.receive() == b"x"
    broken = Worker(lambda connection: connection.send_bytes(b"x" * (1 // 0)))
    with pytest.raises(RuntimeError, match="has failed"):
        broken.receive()
    idle = Worker(lambda connection: connection.send_bytes(connection.recv_bytes()))
    for one in (worker, broken, idle):
        one.close()
    for one in (worker, broken, idle):
        one.join()
    assert capfd.readouterr().err.count("Traceback") == 1, "only the one that failed says so"
