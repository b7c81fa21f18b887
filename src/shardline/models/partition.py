"""How dims, heads and layers are split over ranks. No other code decides this.

It is pure arithmetic: worker, planner and command line agree on it, and a bad shape is refused before loading.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class ExpertShare(NamedTuple):
    """The place of one rank, `rank`, among the `size` ranks over which whole experts are spread."""

    rank: int
    size: int


class Span(msgspec.Struct, frozen=True):
    """The half-open range [start, stop) of a dim that one rank owns."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def scaled(self, width: int) -> Span:
        """The elements of the range if each index stands for `width` of them."""
        return Span(self.start * width, self.stop * width)


@functools.lru_cache(maxsize=4096)
def split_dim(size: int, parts: int, unit: int = 1) -> tuple[Span, ...]:
    """Split [0, size) into `parts` consecutive spans of nearly equal size, with bounds on multiples of `unit`.

    Spans may be empty if size / unit < parts. `size` need not be a multiple of `unit`: the last unit is then shorter.
    """
    num_units = -(-size // unit)
    share, extra = divmod(num_units, parts)
    spans, start = [], 0
    for part in range(parts):
        stop = min(size, start + (share + (part < extra)) * unit)
        spans.append(Span(start, stop))
        start = stop
    return tuple(spans)


@dataclass(frozen=True)
class HeadShare:
    """The query heads of one rank, and the KV heads that they read."""

    heads: Span
    kv_heads: Span


@functools.lru_cache(maxsize=4096)
def split_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[HeadShare, ...]:
    """Query and KV heads of each of `parts` ranks.

    Ranks get whole groups: a KV head with its query heads. If there are more ranks than KV heads, KV heads are
    replicated, and each rank gets some query heads of one group.

    Raises:
        ValueError: there are more ranks than query heads, or a group has fewer heads than ranks.
    """
    group = num_heads // num_kv_heads
    if parts <= num_kv_heads:
        return tuple(HeadShare(Span(kv.start * group, kv.stop * group), kv) for kv in split_dim(num_kv_heads, parts))
    shares = []
    for kv_head, ranks in enumerate(split_dim(parts, num_kv_heads)):
        if ranks.size > group:
            raise ValueError(f"{parts} ranks cannot share {num_heads} attention heads ({num_kv_heads} KV heads)")
        for heads in split_dim(group, ranks.size):
            first = kv_head * group
            shares.append(HeadShare(Span(first + heads.start, first + heads.stop), Span(kv_head, kv_head + 1)))
    return tuple(shares)


def balance_stages(
    costs: Sequence[float],
    num_stages: int,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    joined: frozenset[int] = frozenset(),
) -> tuple[Span, ...]:
    """Split the layers into `num_stages` consecutive non-empty spans, with the lowest cost of the most expensive stage.

    `first_extra` is the cost of the embedding and `last_extra` that of the lm_head, in the unit of `costs`. No stage
    begins at a layer in `joined`. Among equally good splits, the one with cheaper later stages is chosen.

    Raises:
        ValueError: there are fewer layers than stages, or too few places where a stage may begin.
    """
    return _balance(tuple(costs), num_stages, first_extra, last_extra, joined)


@functools.lru_cache(maxsize=256)
def _balance(
    costs: tuple[float, ...], num_stages: int, first_extra: float, last_extra: float, joined: frozenset[int]
) -> tuple[Span, ...]:
    """See `balance_stages`. The planner asks for the same stages again and again."""
    num_layers = len(costs)
    if num_stages > num_layers - len(joined) and joined:
        raise ValueError(
            f"pipeline_parallel_size {num_stages} does not work for this model: some of its layers read the keys and "
            f"values of earlier ones, so layers {min(joined) - 1} to {max(joined)} are in one stage; use "
            f"{num_layers - len(joined)} or fewer"
        )
    if num_layers < num_stages:
        raise ValueError(
            f"pipeline_parallel_size {num_stages} needs at least as many layers, and the model has {num_layers}; "
            f"use {num_layers} or fewer"
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        extra = (first_extra if stage == 0 else 0.0) + (last_extra if stage == num_stages - 1 else 0.0)
        return prefix[stop] - prefix[start] + extra

    # After stage s, best[stop] has the lowest possible maximum over stages 0..s if they end at layer `stop`.
    ends = [stop for stop in range(1, num_layers + 1) if stop not in joined]
    best = {stop: (stage_cost(0, 0, stop), [Span(0, stop)]) for stop in ends}
    for stage in range(1, num_stages):
        candidates = {}
        for stop in (stop for stop in range(stage + 1, num_layers + 1) if stop not in joined):
            worst, chosen = math.inf, stage
            for start in range(stop - 1, stage - 1, -1):
                if start not in best:
                    continue
                cost = stage_cost(stage, start, stop)
                if cost >= worst:  # an earlier start costs even more
                    break
                if (most := max(best[start][0], cost)) < worst:
                    worst, chosen = most, start
            if worst < math.inf:
                candidates[stop] = (worst, [*best[chosen][1], Span(chosen, stop)])
        best = candidates
    return tuple(best[num_layers][1])


def parse_stages(text: str, num_layers: int, num_stages: int, joined: frozenset[int] = frozenset()) -> tuple[Span, ...]:
    """Stages that the user has set, for example "10,12,10". None may begin at a layer in `joined`.

    Raises:
        ValueError: the text is not a list of positive counts, or the counts do not fit the model or the stages.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"pipeline_stages must be layer counts like 10,12,10, got {text!r}") from None
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ValueError(
            f"pipeline_stages {text!r} must be {num_stages} positive counts (pipeline_parallel_size) that add up to "
            f"the model's {num_layers} layers"
        )
    spans, start = [], 0
    for count in counts:
        spans.append(Span(start, start + count))
        start += count
    if any(span.start in joined for span in spans):
        raise ValueError(
            f"pipeline_stages {text!r} separates layers from earlier ones whose keys and values they read; no stage "
            f"may begin in layers {min(joined)} to {max(joined)}"
        )
    return tuple(spans)
