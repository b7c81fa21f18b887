"""The benchmarks over fake engines."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shardline.api.llm import LLM
from shardline.benchmark.workload import WORKLOADS, Workload, random_prompts
from shardline.cli.commands.bench.engine import percentile
from shardline.cli.main import main
from shardline.config.engine import EngineConfig
from tests.api.fake_engine import FakeCluster, load_text


@pytest.fixture(autouse=True)
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()
    real = LLM.from_config

    def from_config(config: EngineConfig) -> LLM:
        return real(config, connect=cluster, load_text=load_text)

    monkeypatch.setattr(LLM, "from_config", from_config)
    return cluster


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str], fake_engines: FakeCluster) -> None:
    path = tmp_path / "report.json"
    words = "bench throughput demo -dp 2 --num-prompts 6 --num-warmups 2 --input-len 10 --output-len 5"
    assert main([*words.split(), "--output-json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["num_prompts"], report["prompt_tokens"], report["generation_tokens"]) == (6, 60, 30)
    assert report["generation_tokens_per_second"] > 0
    for name in ("ttft", "tpot", "latency"):
        assert 0 < report[name]["50"] <= report[name]["90"] <= report[name]["99"]
    assert report["num_steps"] > 0
    assert (report["num_requests"], report["total_num_tokens"]) == (6, 90)
    out = capsys.readouterr().out
    for word in (
        "Throughput: ",
        "Total num prompt tokens:  60",
        "tokens/s",
        "TTFT",
        "TPOT",
        "engine overhead",
        "ms a step",
    ):
        assert word in out
    prompts = [tuple(r.prompt_token_ids) for client in fake_engines.clients for r in client.added]
    assert len(set(prompts)) == len(prompts) == 8, "warm-up must not fill the prefix cache for the measurement"
    assert all(client.closed for client in fake_engines.clients)


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    words = (
        f"bench latency --batch-size 2 --num-iters 3 --input-len 8 --output-len 4 --temperature 0 --output-json {path}"
    )
    assert main(words.split()) == 0
    report = json.loads(path.read_text())
    assert (report["num_prompts"], report["generation_tokens"]) == (6, 24)
    assert len(report["latencies"]) == 3
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 3)
    assert set(report["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    out = capsys.readouterr().out
    assert "latency: 6 prompts" in out
    assert "Avg latency: " in out
    assert "99% percentile latency: " in out


def test_too_long_a_workload_is_the_users_mistake(
    capsys: pytest.CaptureFixture[str], fake_engines: FakeCluster
) -> None:
    assert main(["bench", "latency", "--input-len", "60", "--output-len", "60"]) == 2
    assert "together more than the model's maximum length, 64 tokens" in capsys.readouterr().err
    assert all(client.closed for client in fake_engines.clients)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 75) == 1.75
    assert percentile([1.0], 99) == 1.0
    assert percentile([], 50) == 0.0


def test_workloads_by_name() -> None:
    prompts = random_prompts(random.Random(1), 100, count=4, length=9, shared=6)
    assert {len(prompt) for prompt in prompts} == {9}
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4
    for workload in WORKLOADS.values():
        assert 0 <= workload.shared_len < workload.input_len


def test_a_named_workload_sets_all(tmp_path: Path, fake_engines: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "W5", Workload(5, 12, 3, shared_len=8))
    path = tmp_path / "report.json"
    assert main(f"bench throughput --workload W5 --output-json {path}".split()) == 0
    report = json.loads(path.read_text())
    assert (report["num_prompts"], report["prompt_tokens"], report["generation_tokens"]) == (5, 60, 15)
    measured = [r for client in fake_engines.clients for r in client.added][-5:]
    assert {tuple(r.prompt_token_ids[:8]) for r in measured} == {tuple(measured[0].prompt_token_ids[:8])}
    assert all(r.sampling.temperature == 0.0 for r in measured)


def test_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str], fake_engines: FakeCluster) -> None:
    path = tmp_path / "startup.json"
    words = f"bench startup --num-iters-cold 2 --num-iters-warmup 1 --num-iters-warm 3 --output-json {path}"
    assert main(words.split()) == 0
    result = json.loads(path.read_text())
    assert len(fake_engines.clients) == 6
    assert (len(result["cold_startup_times"]), len(result["warm_startup_times"])) == (2, 3)
    assert result["avg_warm_startup_time"] > 0
    assert set(result["warm_startup_percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    out = capsys.readouterr().out
    assert "COLD STARTUP:" in out
    assert "Avg startup time: " in out
