"""Tables of the measurements: rates, ratios to a baseline, ratios to the best peer of a class, and agreement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardline.benchmark.workload import Workload

OURS = "shardline"
"""The driver whose engines are compared with the others."""

PEER_PRECISIONS = {"bf16": ("bf16",), "int8": ("bf16", "int8"), "int4": ("bf16", "int8", "int4")}
"""The precisions of peers for each precision of ours: a peer's weights must be at least as precise."""

BAR = {
    "bf16": {"W1": 1.2, "W2": 1.25, "W3": 1.15, "W4": 1.25, "W5": 1.5, "W6": 2.0},
    "int8": {"W1": 1.5, "W2": 2.0, "W3": 1.8, "W4": 1.9, "W5": 2.0},
    "int4": {"W1": 1.4, "W2": 1.7, "W3": 1.6, "W4": 1.6},
}
"""The ratio to the best of these peers that we aim for."""


@dataclass
class Measured:
    """The measurements of one engine. Lists are by round, so equal indices mean equal prompts."""

    name: str
    driver: str
    precision: str
    options: list[str]
    version: str = ""
    ready_s: float = 0.0
    peak_rss_mb: float = 0.0
    idle_cores: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[list[list[int]]]] = field(default_factory=dict)
    """Output ids of each prompt, by workload and round."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster one engine is than another: the median of the rounds, the least and the most."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.least:.2f}-{self.most:.2f}]"


def ratio(engine: Measured, other: Measured, workload: str) -> Ratio:
    """The ratio round by round, since the machine changes less within a round than between rounds."""
    pairs = zip(engine.seconds[workload], other.seconds[workload], strict=True)
    ratios = [theirs / own for own, theirs in pairs]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def rates(engine: Measured, name: str, workload: Workload) -> list[float]:
    """Tokens per second of each round: output tokens, or prompt tokens if there is one output token."""
    per_prompt = workload.output_len if workload.output_len > 1 else workload.input_len
    return [workload.num_prompts * per_prompt / seconds for seconds in engine.seconds[name]]


def best_peer(engines: Sequence[Measured], precision: str, workload: str) -> Measured | None:
    """The fastest peer, by median time, for an engine of ours with this precision."""
    peers = [e for e in engines if e.driver != OURS and e.precision in PEER_PRECISIONS[precision]]
    return min(peers, key=lambda peer: statistics.median(peer.seconds[workload]), default=None)


def agreement(engine: Measured, other: Measured) -> tuple[float, float]:
    """Share of prompts whose first output token is the same, and mean length of the common beginning, in tokens.

    Random weights give near ties at the top, so engines with different rounding differ early. The figure shows that
    both ran the same model. It does not show that one of them is wrong.
    """
    first: list[bool] = []
    common: list[int] = []
    for workload, rounds in engine.tokens.items():
        for own_round, other_round in zip(rounds, other.tokens[workload], strict=True):
            for own, theirs in zip(own_round, other_round, strict=True):
                first.append(own[0] == theirs[0])
                differing = (i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b)
                common.append(next(differing, len(own)))
    return statistics.mean(first), statistics.mean(common)


def row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def rate_table(engines: Sequence[Measured], workloads: dict[str, Workload], baseline: Measured) -> list[str]:
    """Tokens/s as median [least-most], and the ratio to the baseline; then the costs of each engine."""
    lines = [row(["tokens/s", *(engine.name for engine in engines)]), "|---" * (len(engines) + 1) + "|"]
    for name, workload in workloads.items():
        cells = []
        for engine in engines:
            measured = rates(engine, name, workload)
            spread = f"{statistics.median(measured):.1f} [{min(measured):.1f}-{max(measured):.1f}]"
            cells.append(f"{spread} {ratio(engine, baseline, name).median:.2f}x")
        lines.append(row([name, *cells]))
    agreements = [agreement(engine, baseline) for engine in engines]
    lines += [
        row(["ready, s", *(f"{engine.ready_s:.1f}" for engine in engines)]),
        row(["peak RSS, MB", *(f"{engine.peak_rss_mb:.0f}" for engine in engines)]),
        row(["cores busy while idle", *(f"{engine.idle_cores:.2f}" for engine in engines)]),
        row([f"first token as {baseline.name}", *(f"{first:.0%}" for first, _ in agreements)]),
        row([f"leading tokens as {baseline.name}", *(f"{common:.1f}" for _, common in agreements)]),
        row(["version", *(engine.version for engine in engines)]),
    ]
    return lines


def bar_table(engines: Sequence[Measured], workloads: dict[str, Workload]) -> list[str]:
    """Each engine of ours compared with the best peer of its class and with the aim; empty without peers."""
    ours = [e for e in engines if e.driver == OURS and any(best_peer(engines, e.precision, w) for w in workloads)]
    if not ours:
        return []
    heads = [f"{e.name} / best peer in {', '.join(PEER_PRECISIONS[e.precision])}" for e in ours]
    lines = [row(["ratio", *heads]), "|---" * (len(ours) + 1) + "|"]
    for name in workloads:
        cells = []
        for engine in ours:
            peer = best_peer(engines, engine.precision, name)
            assert peer is not None
            measured, wanted = ratio(engine, peer, name), BAR[engine.precision].get(name)
            verdict = "" if wanted is None else f", {'met' if measured.median >= wanted else 'MISSED'}: {wanted}"
            cells.append(f"{measured} {peer.name}{verdict}")
        lines.append(row([name, *cells]))
    return lines


def as_json(engines: Sequence[Measured], workloads: dict[str, Workload], baseline: Measured) -> dict[str, Any]:
    """Everything except the tokens: raw seconds, and the figures of the tables."""
    told = {}
    for engine in engines:
        first, common = agreement(engine, baseline)
        told[engine.name] = {
            "driver": engine.driver,
            "precision": engine.precision,
            "options": engine.options,
            "version": engine.version,
            "ready_s": engine.ready_s,
            "peak_rss_mb": engine.peak_rss_mb,
            "idle_cores": engine.idle_cores,
            "first_token_agreement": first,
            "mean_common_tokens": common,
            "seconds": engine.seconds,
            "tokens_per_s": {name: rates(engine, name, workload) for name, workload in workloads.items()},
            "ratio_to_baseline": {name: vars(ratio(engine, baseline, name)) for name in workloads},
        }
    bar = [
        {"engine": e.name, "workload": name, "peer": peer.name, "wanted": BAR[e.precision].get(name)}
        | vars(ratio(e, peer, name))
        for e in engines
        for name in workloads
        if e.driver == OURS and (peer := best_peer(engines, e.precision, name)) is not None
    ]
    return {"baseline": baseline.name, "engines": told, "against_best_peer": bar}
