"""Says in words where one rank works while another idles, what the likely cause is, and which flag helps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

_BUSY = 0.5
"""Share of the time above which a rank counts as busy."""
_IDLE = 0.6
"""A rank idles if it is busy for less than this share of what the busiest one is."""
_SKEW = 1.3
"""Tokens of the busiest rank's experts, divided by the mean, that explain why others wait."""
_SPREADING = "least_work"


class RankLoad(NamedTuple):
    """One rank over the last seconds."""

    rank: int
    stage: int
    host: str
    busy: float
    """Share of the time in which it computed."""
    waiting: float
    """Share of the time in which it waited for other ranks."""


class EngineLoad(NamedTuple):
    """One engine over the last seconds."""

    number: int
    ranks: Sequence[RankLoad]
    num_running: int
    """Requests in its batches."""
    num_layers: Sequence[int]
    """Of each pipeline stage; empty: unknown."""
    expert_skew: float = 1.0
    """Tokens of the busiest rank's experts divided by the mean."""
    whole_experts: bool = False
    """Whether --enable-expert-parallel is set."""

    @property
    def busy(self) -> float:
        """That of its busiest rank."""
        return max((rank.busy for rank in self.ranks), default=0.0)


def find_imbalances(engines: Sequence[EngineLoad], router_policy: str) -> list[str]:
    """A sentence for each imbalance; `router_policy` is that of the server."""
    found = [_between_engines(engines, router_policy)]
    for engine in engines:
        in_order = sorted(engine.ranks, key=lambda rank: rank.stage)
        stages = [list(ranks) for _, ranks in itertools.groupby(in_order, key=lambda rank: rank.stage)]
        found += [_between_stages(engine, stages), *(_within_stage(engine, ranks) for ranks in stages)]
    return [sentence for sentence in found if sentence]


def _between_stages(engine: EngineLoad, stages: Sequence[Sequence[RankLoad]]) -> str:
    if len(stages) < 2:
        return ""
    busiest, idlest = _ends([max(ranks, key=lambda rank: rank.busy) for ranks in stages])
    spent = max(rank.busy + rank.waiting for rank in engine.ranks)
    if 0 < engine.num_running < len(stages) and spent >= _BUSY:
        return (
            f"Replica {engine.number}: its {len(stages)} stages take turns, since only {engine.num_running} request"
            f"{'s' * (engine.num_running > 1)} run{'s' * (engine.num_running == 1)}. Send more at once, or split "
            "layers instead of stacking them: --tensor-parallel-size in the place of --pipeline-parallel-size."
        )
    if busiest.busy < _BUSY or idlest.busy >= _IDLE * busiest.busy:
        return ""
    layers = ",".join(map(str, engine.num_layers))
    return (
        f"Replica {engine.number}: stage {busiest.stage} is busy {busiest.busy:.0%} of the time, stage {idlest.stage} "
        f"only {idlest.busy:.0%}: the layers of stage {busiest.stage} take longer"
        + (f" on {busiest.host}" if busiest.host != idlest.host else "")
        + f". Give it fewer: --pipeline-stages{f' (now {layers})' if layers else ''}."
    )


def _within_stage(engine: EngineLoad, ranks: Sequence[RankLoad]) -> str:
    busiest, idlest = _ends(ranks)
    if busiest.busy < _BUSY or idlest.busy >= _IDLE * busiest.busy or idlest.waiting < busiest.waiting:
        return ""
    waits = (
        f"Replica {engine.number}: rank {idlest.rank} waits {idlest.waiting:.0%} of the time, for rank {busiest.rank}, "
        f"which is busy {busiest.busy:.0%}"
    )
    if engine.whole_experts and engine.expert_skew >= _SKEW:
        return (
            f"{waits}: tokens choose the experts of a rank up to {engine.expert_skew:.1f} times as often as the mean. "
            "Without --enable-expert-parallel, every rank has a part of each expert."
        )
    if busiest.host != idlest.host:
        return (
            f"{waits}: host {busiest.host} is slower than {idlest.host}, or shares its cores. `shardline doctor` "
            "measures both; --pipeline-parallel-size over hosts lets a slower one have fewer layers."
        )
    return (
        f"{waits}. Their shares are equal, so other programs, or more threads than cores, slow its cores down: lower "
        "--cpu-threads, or free the cores."
    )


def _between_engines(engines: Sequence[EngineLoad], router_policy: str) -> str:
    if len(engines) < 2:
        return ""
    busiest = max(engines, key=lambda engine: engine.busy)
    idlest = min(engines, key=lambda engine: engine.busy)
    if busiest.busy < _BUSY or idlest.busy >= _IDLE * busiest.busy or busiest.num_running - idlest.num_running < 2:
        return ""
    cause = (
        f"--router-policy {router_policy} keeps alike prompts on one replica; {_SPREADING} leaves when waiting costs "
        "more than computing again"
        if router_policy in ("prefix_hash", "cache_aware")
        else f"its requests are longer than --router-policy {router_policy} can see; {_SPREADING} counts tokens"
        if router_policy != _SPREADING
        else "its requests turned out longer than was to be expected, and new ones go to the other"
    )
    return (
        f"Replica {busiest.number} is busy {busiest.busy:.0%} with {busiest.num_running} requests, replica "
        f"{idlest.number} only {idlest.busy:.0%} with {idlest.num_running}: {cause}."
    )


def _ends(ranks: Sequence[RankLoad]) -> tuple[RankLoad, RankLoad]:
    """The busiest and the idlest rank."""
    return max(ranks, key=lambda rank: rank.busy), min(ranks, key=lambda rank: rank.busy)
