"""The counters of an engine, as it reports them to the front."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens each expert got since the engine's start; a token counts once for each expert it chose."""

    expert_tokens: list[int]
    """For each expert, its tokens, summed over layers."""
    rank_tokens: list[int]
    """For each rank of the replica, the tokens of its experts, summed over its layers."""
    expert_imbalance: float
    """Tokens of a layer's busiest expert divided by the mean of its experts, averaged over layers; 1 is even."""
    rank_imbalance: float
    """The same for the ranks that share a layer."""


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """How often drafts were right since the engine's start."""

    num_drafts: int
    num_tokens: int
    accepted: list[int]
    """For each position of a draft, how many drafts were right up to there."""

    @property
    def num_accepted(self) -> int:
        """Tokens of drafts that were accepted."""
        return sum(self.accepted)


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one engine since its start, and its current gauges."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Blocks referenced by a live sequence; cached but unreferenced blocks are free."""
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """How many of them were found."""
    step_seconds: float = 0.0
    """Sum of the workers' step times."""
    engine_seconds: float = 0.0
    """Sum of the engine loop's own time, without waiting for workers."""
    experts: ExpertLoad | None = None
    """While the engine is busy, these are about a second old. None: the model has no experts."""
    drafts: DraftStats | None = None
    """None: the engine does not decode speculatively."""


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """The sums of the counters and gauges of several replicas."""
    names = set(EngineStats.__struct_fields__) - {"experts", "drafts"}  # expert loads of different engines have no sum
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in names},
        drafts=merge_drafts([one.drafts for one in stats if one.drafts is not None]),
    )


def merge_lockstep(stats: Sequence[EngineStats]) -> EngineStats:
    """The counters and gauges of replicas that share their steps, and so the counters of steps."""
    if len(stats) == 1:
        return stats[0]
    shared = ("num_steps", "step_seconds", "engine_seconds", "experts")
    return msgspec.structs.replace(merge_stats(stats), **{name: getattr(stats[0], name) for name in shared})


def merge_drafts(stats: Sequence[DraftStats]) -> DraftStats | None:
    """The sums of the counters of several replicas; None: there are none."""
    if not stats:
        return None
    accepted = [sum(counts) for counts in zip(*(one.accepted for one in stats), strict=True)]
    return DraftStats(sum(one.num_drafts for one in stats), sum(one.num_tokens for one in stats), accepted)
