"""The counters of an engine, as it reports them to the front."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.messages.copies import CopyCounts


class ExpertMoves(msgspec.Struct, frozen=True, array_like=True):
    """What was moved between ranks since the engine's start."""

    count: int
    unmoved_imbalance: float
    """`ExpertLoad.rank_imbalance` of the last window of decision, if no expert had ever moved."""
    imbalance: float
    """The same with the experts where they are now."""


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
    moves: ExpertMoves | None = None
    """None: experts do not move."""


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """How often drafts were right since the engine's start."""

    num_drafts: int
    num_tokens: int
    accepted: list[int]
    """For each position of a draft, how many drafts were right up to there."""
    row_seconds: dict[int, float] = {}
    """What a guess adds to a decode step, as measured last; 4 stands for steps of 4 to 7 sequences."""

    @property
    def num_accepted(self) -> int:
        """Tokens of drafts that were accepted."""
        return sum(self.accepted)


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """What a second tier of the KV cache holds, and what came of it since the engine's start."""

    num_slots: int
    """Blocks that it has room for, in host memory."""
    num_used: int
    queries: int
    """Tokens of prefixes that the pool did not have."""
    hits: int
    """Those of them that came from the tier."""
    lost_blocks: int
    """Blocks that it was to have, and a rank did not have any more; they are computed again."""
    copies: CopyCounts
    """Of all ranks."""


def _merge_tiers(stats: Sequence[TierStats]) -> TierStats | None:
    """The sums of several replicas; None: there are none."""
    if not stats:
        return None
    names = set(TierStats.__struct_fields__) - {"copies"}
    copies = sum((one.copies for one in stats), CopyCounts())
    return TierStats(copies=copies, **{name: sum(getattr(one, name) for one in stats) for name in names})


class RankTimes(msgspec.Struct, frozen=True, array_like=True):
    """How one rank of an engine has spent its time since the engine's start. Outside steps it is idle."""

    rank: int
    num_steps: int
    busy_seconds: float
    """In steps, without waiting for other ranks."""
    waiting_seconds: float
    """In steps, waiting for other ranks. Exchanges within a CUDA graph count as busy."""


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of steps by their tokens; the last bucket has none."""


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
    tier: TierStats | None = None
    """None: the KV cache has no second tier."""
    step_tokens: list[int] = []
    """How many steps had so many tokens, by STEP_TOKEN_BOUNDS; empty: none has run. As in vLLM, these are the tokens
    that a step samples, and a prompt's with its first one; steps without any are not counted."""
    ranks: list[RankTimes] = []
    """Those of the engine's ranks. While the engine is busy, these are about a second old."""
    in_lockstep: list[EngineStats] = []
    """The same of each of its replicas, if it has several; the first has the load of the experts, which all share, and
    the times of all ranks."""

    def each_replica(self, count: int) -> list[EngineStats]:
        """The counters of each of the engine's `count` replicas, which are zero before it reports any."""
        return self.in_lockstep or [self, *[EngineStats()] * (count - 1)]

    def with_gauges(self, **gauges: int) -> EngineStats:
        """The same counters with other gauges, also of every replica."""
        replicas = [one.with_gauges(**gauges) for one in self.in_lockstep]
        return msgspec.structs.replace(self, in_lockstep=replicas, **gauges)


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """The sums of the counters and gauges of several replicas, or of one engine at several times."""
    # Expert loads of different engines have no sum.
    names = set(EngineStats.__struct_fields__) - {"experts", "drafts", "tier", "step_tokens", "ranks", "in_lockstep"}
    replicas = zip(*(one.in_lockstep for one in stats if one.in_lockstep), strict=True)
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in names},
        step_tokens=[
            sum(counts) for counts in zip(*(one.step_tokens for one in stats if one.step_tokens), strict=True)
        ],
        drafts=merge_drafts([one.drafts for one in stats if one.drafts is not None]),
        tier=_merge_tiers([one.tier for one in stats if one.tier is not None]),
        ranks=[_add_times(times) for times in zip(*(one.ranks for one in stats if one.ranks), strict=True)],
        in_lockstep=[merge_stats(one) for one in replicas],
    )


def _add_times(times: Sequence[RankTimes]) -> RankTimes:
    return RankTimes(
        times[0].rank,
        sum(one.num_steps for one in times),
        sum(one.busy_seconds for one in times),
        sum(one.waiting_seconds for one in times),
    )


def merge_lockstep(replicas: list[EngineStats]) -> EngineStats:
    """The counters and gauges of an engine whose replicas share their steps, and so the counters of steps. The first
    one has the load of the experts and the times of the ranks."""
    first = replicas[0]
    shared = ("num_steps", "step_seconds", "engine_seconds", "experts", "ranks")
    return msgspec.structs.replace(
        merge_stats(replicas), in_lockstep=replicas, **{name: getattr(first, name) for name in shared}
    )


def merge_drafts(stats: Sequence[DraftStats]) -> DraftStats | None:
    """The sums of the counters of several replicas, and the last measured times; None: there are none."""
    if not stats:
        return None
    accepted = [sum(counts) for counts in zip(*(one.accepted for one in stats), strict=True)]
    return DraftStats(
        sum(one.num_drafts for one in stats),
        sum(one.num_tokens for one in stats),
        accepted,
        {size: seconds for one in stats for size, seconds in one.row_seconds.items()},
    )
