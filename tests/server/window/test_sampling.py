"""Rates, shares and ten minutes of them, from counters that grow."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.messages.stats import EngineStats, RankTimes
from shardline.metrics.histogram import FastHistogram
from shardline.server.window.sampling import HISTORY, Sampler


class Source:
    """Counters of two replicas, of which the second does nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.first_token = FastHistogram("f", "F.", ("model_name", "m"), (0.1, 0.2, 0.4))
        self.stats = EngineStats(kv_blocks_total=10, ranks=[RankTimes(0, 0, 0.0, 0.0), RankTimes(1, 0, 0.0, 0.0)])
        self.idle = EngineStats(kv_blocks_total=10)
        self.sampler = Sampler(self.read, self.first_token, lambda: self.now)

    def read(self) -> Sequence[EngineStats]:
        return [self.stats, self.idle]

    def run(self, seconds: int) -> None:
        """Each second: 8 steps, 100 tokens, 40 prompt tokens of which 10 are cached; rank 1 waits half of it."""
        for _ in range(seconds):
            self.now += 1.0
            old, first, second = self.stats, *self.stats.ranks
            self.stats = EngineStats(
                num_running=3,
                kv_blocks_total=10,
                kv_blocks_used=5,
                num_steps=old.num_steps + 8,
                generation_tokens=old.generation_tokens + 100,
                prompt_tokens=old.prompt_tokens + 40,
                prefix_queries=old.prefix_queries + 40,
                prefix_hits=old.prefix_hits + 10,
                step_seconds=old.step_seconds + 0.8,
                ranks=[
                    RankTimes(0, first.num_steps + 8, first.busy_seconds + 0.8, 0.0),
                    RankTimes(1, second.num_steps + 8, second.busy_seconds + 0.4, second.waiting_seconds + 0.4),
                ],
            )
            self.sampler.take()


def test_rates_of_a_replica_and_of_all() -> None:
    source = Source()
    source.run(20)
    one, idle, both = source.sampler.rates(0), source.sampler.rates(1), source.sampler.rates()
    assert (one.running, one.kv_usage, both.kv_usage) == (3, 0.5, 0.25)
    assert (one.generation_tokens_per_second, both.generation_tokens_per_second) == (100.0, 100.0)
    assert (one.hit_rate, one.step_seconds) == (0.25, 0.1)
    assert (idle.generation_tokens_per_second, idle.hit_rate, idle.step_seconds) == (0.0, None, None)


def test_shares_of_ranks() -> None:
    source = Source()
    source.run(20)
    busy, waits = source.sampler.shares(0)
    assert (busy.busy, busy.waiting, busy.step_seconds) == (0.8, 0.0, 0.1)
    assert (waits.busy, waits.waiting) == (0.4, 0.4)
    assert source.sampler.shares(1) == []


def test_percentiles_are_those_of_the_last_minute() -> None:
    source = Source()
    source.first_token.observe(9.0)
    source.run(70)
    assert source.sampler.first_token().p50 is None
    for seconds in (0.05, 0.15, 0.15, 0.3):
        source.first_token.observe(seconds)
    source.run(1)
    found = source.sampler.first_token()
    assert found.count == 4
    assert found.p50 == 0.15
    assert 0.2 < (found.p95 or 0.0) <= 0.4


def test_the_history_is_bounded_and_begins_anew_when_ranks_appear() -> None:
    source = Source()
    source.run(HISTORY + 50)
    history = source.sampler.history()
    assert len(history.times) == HISTORY
    assert all(len(column) == HISTORY for column in history.series.values())
    assert history.series["generation_tokens_per_second"][-1] == 100.0
    assert [rank[-1] for rank in history.busy[0]] == [80, 40]
    assert history.busy[1] == []
    source.idle = EngineStats(kv_blocks_total=10, ranks=[RankTimes(n, 0, 0.0, 0.0) for n in range(2)])
    source.run(1)
    assert len(source.sampler.history().times) == 1
