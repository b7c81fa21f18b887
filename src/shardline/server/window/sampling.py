"""Looks at the engines' counters once a second, and computes rates from the differences."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardline.messages.stats import EngineStats, RankTimes, merge_stats
from shardline.metrics.histogram import FastHistogram
from shardline.server.window import FirstToken, History, Rates

SAMPLE_SECONDS = 1.0
HISTORY = 600
"""Samples that are kept."""
_RATE_SECONDS = 5.0
_RANK_SECONDS = 10.0
"""The times of ranks reach the front about once a second, so they need a longer look."""
_FIRST_TOKEN_SECONDS = 60.0
_NO_TIMES = RankTimes(0, 0, 0.0, 0.0)


class Sample(NamedTuple):
    """The counters at one moment."""

    at: float
    """On the monotonic clock."""
    stats: Sequence[EngineStats]
    """Of each replica."""
    first_tokens: Sequence[int]
    """Requests whose first token took so long, by the bounds of the histogram."""


class Share(NamedTuple):
    """How a rank has spent its time lately."""

    busy: float
    waiting: float
    step_seconds: float | None


class _Point(NamedTuple):
    """What is kept of a second for ten minutes."""

    time: float
    values: tuple[float | None, ...]
    busy: tuple[bytes, ...]
    """For each replica, the busy share of its ranks in percent."""


class Sampler:
    """The samples of the last minute, and the points of the last ten."""

    def __init__(
        self,
        read_stats: Callable[[], Sequence[EngineStats]],
        first_token: FastHistogram,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_stats = read_stats
        self._first_token = first_token
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=int(_FIRST_TOKEN_SECONDS / SAMPLE_SECONDS) + 1)
        self._points: deque[_Point] = deque(maxlen=HISTORY)
        self.take()

    def take(self) -> None:
        """Take a sample. Call this once a second."""
        stats = self._read_stats()
        self._samples.append(Sample(self._clock(), stats, self._first_token.counts()))
        busy = tuple(
            bytes(min(100, round(100 * share.busy)) for share in self.shares(index)) for index in range(len(stats))
        )
        rates = self.rates()
        values = (*(getattr(rates, name) for name in Rates.__struct_fields__), self.first_token().p50)
        if self._points and list(map(len, self._points[-1].busy)) != list(map(len, busy)):
            self._points.clear()  # the engines have told of their ranks
        self._points.append(_Point(time.time(), values, busy))

    @property
    def stats(self) -> Sequence[EngineStats]:
        """The latest counters of each replica."""
        return self._samples[-1].stats

    @property
    def age(self) -> float:
        """Seconds since the last sample."""
        return self._clock() - self._samples[-1].at

    def rates(self, replica: int | None = None) -> Rates:
        """The rates of a replica, or of all together."""

        def pick(sample: Sample) -> EngineStats:
            return merge_stats(sample.stats) if replica is None else sample.stats[replica]

        first, seconds = self._before(_RATE_SECONDS)
        was, now = pick(first), pick(self._samples[-1])
        queries, steps = now.prefix_queries - was.prefix_queries, now.num_steps - was.num_steps
        return Rates(
            running=now.num_running,
            waiting=now.num_waiting,
            kv_usage=_rounded(now.kv_blocks_used / now.kv_blocks_total) if now.kv_blocks_total else 0.0,
            generation_tokens_per_second=_rounded((now.generation_tokens - was.generation_tokens) / seconds),
            prompt_tokens_per_second=_rounded((now.prompt_tokens - was.prompt_tokens) / seconds),
            hit_rate=_rounded((now.prefix_hits - was.prefix_hits) / queries) if queries else None,
            step_seconds=_rounded((now.step_seconds - was.step_seconds) / steps) if steps else None,
        )

    def shares(self, replica: int) -> list[Share]:
        """How the ranks of a replica have spent their time."""
        first, seconds = self._before(_RANK_SECONDS)
        before = first.stats[replica].ranks if replica < len(first.stats) else []
        now = self.stats[replica].ranks
        return [
            _share(was, times, seconds)
            for was, times in zip([*before, *[_NO_TIMES] * (len(now) - len(before))], now, strict=True)
        ]

    def first_token(self) -> FirstToken:
        """Percentiles, interpolated within the buckets of the histogram."""
        first, _ = self._before(_FIRST_TOKEN_SECONDS)
        counts = [now - was for was, now in zip(first.first_tokens, self._samples[-1].first_tokens, strict=True)]
        bounds = self._first_token.bounds
        return FirstToken(sum(counts), _quantile(counts, bounds, 0.5), _quantile(counts, bounds, 0.95))

    def history(self) -> History:
        """The last ten minutes."""
        names = (*Rates.__struct_fields__, "first_token")
        columns = zip(*(point.values for point in self._points), strict=True)
        busy = zip(*(point.busy for point in self._points), strict=True)
        return History(
            times=[round(point.time, 1) for point in self._points],
            series={name: list(column) for name, column in zip(names, columns, strict=True)},
            busy=[[list(rank) for rank in zip(*replica, strict=True)] for replica in busy],
        )

    def _before(self, seconds: float) -> tuple[Sample, float]:
        """The sample of so long ago, or the oldest one, and the seconds since then."""
        last = self._samples[-1]
        first = next(one for one in self._samples if one is last or last.at - one.at < seconds + SAMPLE_SECONDS / 2)
        return first, max(last.at - first.at, 1e-3)


def _share(was: RankTimes, now: RankTimes, seconds: float) -> Share:
    busy, waiting = now.busy_seconds - was.busy_seconds, now.waiting_seconds - was.waiting_seconds
    steps = now.num_steps - was.num_steps
    # What is counted may be a second older than the sample.
    total = max(seconds, busy + waiting)
    return Share(
        _rounded(max(0.0, busy) / total),
        _rounded(max(0.0, waiting) / total),
        _rounded((busy + waiting) / steps) if steps > 0 else None,
    )


def _quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """The quantile of values counted by upper bounds; those above the last bound count as that bound."""
    total, seen = sum(counts), 0
    if total <= 0:
        return None
    for count, (low, high) in zip(counts, pairwise([0.0, *bounds]), strict=False):
        if count and seen + count >= share * total:
            return _rounded(low + (high - low) * (share * total - seen) / count)
        seen += count
    return bounds[-1]


def _rounded(value: float) -> float:
    """Four digits: more would be bytes that nobody sees."""
    return float(f"{value:.4g}")
