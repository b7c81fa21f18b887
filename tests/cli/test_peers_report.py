"""The arithmetic of perf/peers: the best peer of a class, and the ratios."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from shardline.benchmark.workload import WORKLOADS


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """perf/peers is a folder of scripts, not a package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "perf" / "peers"))
    import report

    return report


def engines(report: ModuleType) -> list:
    """Two configurations of Shardline and a peer of each precision, with three rounds of W1."""
    seconds = {
        "ours-bf16": ("shardline", "bf16", [1.0, 2.0, 1.0]),
        "ours-int8": ("shardline", "int8", [1.0, 1.0, 1.0]),
        "slow-bf16": ("vllm", "bf16", [2.0, 3.0, 4.0]),
        "fast-int8": ("openvino", "int8", [1.2, 1.2, 1.2]),
        "faster-int4": ("llama_cpp", "int4", [0.5, 0.5, 0.5]),
    }
    tokens = {"ours-bf16": [[[1, 2, 3]]] * 3, "slow-bf16": [[[1, 2, 4]]] * 3}
    return [
        report.Measured(
            name, driver, precision, [], seconds={"W1": list(times)}, tokens={"W1": tokens.get(name, [[[9, 2, 3]]] * 3)}
        )
        for name, (driver, precision, times) in seconds.items()
    ]


def test_an_engine_is_held_against_peers_that_are_at_least_as_precise(report: ModuleType) -> None:
    best = {
        precision: report.best_peer(engines(report), precision, "W1").name for precision in ("bf16", "int8", "int4")
    }
    assert best == {"bf16": "slow-bf16", "int8": "fast-int8", "int4": "faster-int4"}


def test_a_ratio_is_taken_round_by_round(report: ModuleType) -> None:
    ours, _, peer, *_ = engines(report)
    assert report.ratio(ours, peer, "W1") == report.Ratio(median=2.0, least=1.5, most=4.0)
    assert report.rates(ours, "W1", WORKLOADS["W1"]) == [64.0, 32.0, 64.0]


def test_the_bar_is_told_met_or_missed(report: ModuleType) -> None:
    heads, _, line = report.bar_table(engines(report), {"W1": WORKLOADS["W1"]})
    assert heads == "| ratio | ours-bf16 / best peer in bf16 | ours-int8 / best peer in bf16, int8 |"
    assert line == "| W1 | 2.00 [1.50-4.00] slow-bf16, met: 1.2 | 1.20 [1.20-1.20] fast-int8, MISSED: 1.5 |"


def test_no_peer_no_bar(report: ModuleType) -> None:
    assert report.bar_table(engines(report)[:2], {"W1": WORKLOADS["W1"]}) == []


def test_agreement_counts_first_tokens_and_common_beginnings(report: ModuleType) -> None:
    ours, other, peer, *_ = engines(report)
    assert report.agreement(ours, peer) == (1.0, 2.0)
    assert report.agreement(other, peer) == (0.0, 0.0)
