"""Engine counters and gauges. They are read when Prometheus asks, not pushed at every step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from shardline.deployment.deployment import KernelFallback
from shardline.messages.copies import CopyCounts
from shardline.messages.stats import (
    STEP_TOKEN_BOUNDS,
    DraftStats,
    EngineStats,
    ExpertLoad,
    ExpertMoves,
    RankTimes,
    TierStats,
)

_LABELS = ("model_name", "engine")
Stats = TypeVar("Stats")

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait for a place in the batch.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV blocks in use; 1 means all of them.",
        lambda s: s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else 0.0,
    ),
    ("kv_blocks", "KV blocks of the cache.", lambda s: s.kv_blocks_total),
    ("kv_blocks_used", "KV blocks referenced by a live sequence.", lambda s: s.kv_blocks_used),
)

_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_preemptions", "Sequences preempted because the KV cache was full.", lambda s: s.num_preemptions),
    ("prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("num_steps", "Engine steps.", lambda s: s.num_steps),
    ("step_seconds", "Seconds that workers spent in steps.", lambda s: s.step_seconds),
    (
        "engine_seconds",
        "Seconds of the engine loop's own time, without waiting for workers.",
        lambda s: s.engine_seconds,
    ),
)

_DRAFT_COUNTERS: tuple[tuple[str, str, Callable[[DraftStats], float]], ...] = (
    ("spec_decode_num_drafts", "Drafts of a sequence's next tokens.", lambda d: d.num_drafts),
    ("spec_decode_num_draft_tokens", "Tokens of drafts.", lambda d: d.num_tokens),
    ("spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted.", lambda d: d.num_accepted),
)

_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    ("kv_offload_blocks", "Blocks that the second tier of the KV cache has host memory for.", lambda t: t.num_slots),
    ("kv_offload_blocks_used", "Blocks that the second tier holds in host memory.", lambda t: t.num_used),
)

_TIER_COUNTERS: tuple[tuple[str, str, Callable[[TierStats], float]], ...] = (
    (
        "external_prefix_cache_queries",
        "Tokens of prefixes that the KV cache did not have and the second tier was asked for.",
        lambda t: t.queries,
    ),
    ("external_prefix_cache_hits", "Those of them that came from the second tier.", lambda t: t.hits),
    (
        "kv_offload_lost_blocks",
        "Blocks that a rank did not have any more, so that they were computed again.",
        lambda t: t.lost_blocks,
    ),
    (
        "kv_offload_corrupt_blocks",
        "Parts of blocks whose checksum was wrong when they were to be used.",
        lambda t: t.copies.corrupt_blocks,
    ),
    ("kv_offload_file_written_bytes", "Bytes of blocks written to files.", lambda t: t.copies.written_bytes),
    ("kv_offload_file_read_bytes", "Bytes of blocks read from files.", lambda t: t.copies.read_bytes),
    (
        "kv_offload_file_errors",
        "Times that a file could not be written or read, or not in time, so that all were left alone for a minute.",
        lambda t: t.copies.file_errors,
    ),
)

_TRANSFERS: tuple[tuple[str, Callable[[CopyCounts], float], Callable[[CopyCounts], float]], ...] = (
    ("GPU_to_CPU", lambda c: c.stored_bytes, lambda c: c.stored_seconds),
    ("CPU_to_GPU", lambda c: c.fetched_bytes, lambda c: c.fetched_seconds),
)
"""The directions of copies, by vLLM's labels; on CPUs, both ends are host memory."""

_RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankTimes], float]], ...] = (
    ("rank_steps", "Steps of a rank.", lambda r: r.num_steps),
    ("rank_busy_seconds", "Seconds that a rank computed in steps.", lambda r: r.busy_seconds),
    ("rank_waiting_seconds", "Seconds that a rank waited in steps for other ranks.", lambda r: r.waiting_seconds),
)

_EXPERT_COUNTERS: tuple[tuple[str, str, str, Callable[[ExpertLoad], Sequence[int]]], ...] = (
    (
        "expert_tokens",
        "Tokens that chose an expert, summed over layers; a token counts once for each expert it chose.",
        "expert",
        lambda e: e.expert_tokens,
    ),
    (
        "expert_rank_tokens",
        "Tokens of a rank's experts, summed over layers.",
        "rank",
        lambda e: e.rank_tokens,
    ),
)

_MOVE_COUNTERS: tuple[tuple[str, str, Callable[[ExpertMoves], float]], ...] = (
    ("expert_moves", "Moves of experts between ranks.", lambda m: m.count),
)

_MOVE_GAUGES: tuple[tuple[str, str, Callable[[ExpertMoves], float]], ...] = (
    (
        "expert_window_imbalance",
        "Tokens of the busiest rank divided by the mean in the last window of decision, with experts where they are.",
        lambda m: m.imbalance,
    ),
    (
        "expert_window_imbalance_unmoved",
        "The same if no expert had ever moved.",
        lambda m: m.unmoved_imbalance,
    ),
)

_EXPERT_GAUGES: tuple[tuple[str, str, Callable[[ExpertLoad], float]], ...] = (
    (
        "expert_imbalance",
        "Tokens of the busiest expert divided by the mean, averaged over layers; 1 is even.",
        lambda e: e.expert_imbalance,
    ),
    (
        "expert_rank_imbalance",
        "Tokens of the busiest rank divided by the mean, averaged over layers; 1 is even.",
        lambda e: e.rank_imbalance,
    ),
)


class EngineCollector:
    """Turns `read_stats()`, one EngineStats per replica, into metric families labelled `model_name` and `engine`."""

    def __init__(
        self,
        model_name: str,
        read_stats: Callable[[], Sequence[EngineStats]],
        read_cache_config: Callable[[], Mapping[str, str]],
        read_refused: Callable[[], int] = int,
        read_fallbacks: Callable[[], Sequence[Sequence[KernelFallback]]] = tuple,
    ) -> None:
        self._model_name = model_name
        self._read_stats = read_stats
        self._read_cache_config = read_cache_config
        self._read_refused = read_refused
        self._read_fallbacks = read_fallbacks

    def describe(self) -> Iterable[Metric]:
        """Nothing: the families need no check for duplicates, and the engines may not have started."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One family per metric, one sample per replica."""
        replicas = [((self._model_name, str(index)), stats) for index, stats in enumerate(self._read_stats())]
        yield from _families(GaugeMetricFamily, _GAUGES, replicas)
        yield from _families(CounterMetricFamily, _COUNTERS, replicas)
        yield from _queue_metrics(self._model_name, replicas, self._read_refused())
        yield _step_tokens(replicas)
        config = self._read_cache_config()
        if config:
            info = GaugeMetricFamily(
                "shardline:cache_config_info", "The KV cache's configuration.", labels=(*_LABELS, *config)
            )
            for labels, stats in replicas:
                info.add_metric((*labels, *{**config, "num_gpu_blocks": str(stats.kv_blocks_total)}.values()), 1)
            yield info
        for name, text, read in _RANK_COUNTERS:
            counter = CounterMetricFamily(f"shardline:{name}", text, labels=(*_LABELS, "rank"))
            for labels, stats in replicas:
                for times in stats.ranks:
                    counter.add_metric((*labels, str(times.rank)), read(times))
            yield counter
        yield _fallbacks(self._model_name, self._read_fallbacks())
        yield from _draft_metrics([(labels, stats.drafts) for labels, stats in replicas if stats.drafts is not None])
        yield from _tier_metrics([(labels, stats.tier) for labels, stats in replicas if stats.tier is not None])
        yield from _expert_metrics([(labels, stats.experts) for labels, stats in replicas if stats.experts is not None])


def _families(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    table: Iterable[tuple[str, str, Callable[[Stats], float]]],
    replicas: Sequence[tuple[tuple[str, str], Stats]],
) -> Iterable[Metric]:
    """The families of a table of names, texts and values."""
    for name, text, value in table:
        family = kind(f"shardline:{name}", text, labels=_LABELS)
        for labels, stats in replicas:
            family.add_metric(labels, value(stats))
        yield family


def _fallbacks(model_name: str, engines: Sequence[Sequence[KernelFallback]]) -> Metric:
    """One sample for each kernel of an engine that is not used."""
    gauge = GaugeMetricFamily(
        "shardline:kernel_fallbacks",
        "Kernels of a GPU in whose place torch computes, because they lack a part of the model, or failed here.",
        labels=(*_LABELS, "kernel"),
    )
    for index, fallbacks in enumerate(engines):
        for fallback in fallbacks:
            gauge.add_metric((model_name, str(index), fallback.kernel), 1)
    return gauge


def _queue_metrics(
    model_name: str, replicas: Sequence[tuple[tuple[str, str], EngineStats]], num_refused: int
) -> Iterable[Metric]:
    """Why requests wait or are refused, with vLLM's labels. All wait for room here."""
    waiting = GaugeMetricFamily(
        "shardline:num_requests_waiting_by_reason",
        "Sequences that wait for a place in the batch; capacity: for room.",
        labels=(*_LABELS, "reason"),
    )
    for labels, stats in replicas:
        waiting.add_metric((*labels, "capacity"), stats.num_waiting)
    refused = CounterMetricFamily(
        "shardline:admission_rejections",
        "Requests that were refused because --max-num-waiting were waiting.",
        labels=("model_name", "reason"),
    )
    refused.add_metric((model_name, "max_num_queued_reqs"), num_refused)
    return waiting, refused


def _step_tokens(replicas: Sequence[tuple[tuple[str, str], EngineStats]]) -> Metric:
    """The histogram of steps by their tokens."""
    family = HistogramMetricFamily(
        "shardline:iteration_tokens_total",
        "Tokens of prompts that got their first token, and of answers, of an engine step.",
        labels=_LABELS,
    )
    for labels, stats in replicas:
        counts = itertools.accumulate(stats.step_tokens or [0] * (len(STEP_TOKEN_BOUNDS) + 1))
        bounds = [*(repr(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]
        total = stats.prompt_tokens + stats.generation_tokens
        family.add_metric(labels, list(zip(bounds, map(float, counts), strict=True)), total)
    return family


def _draft_metrics(replicas: Sequence[tuple[tuple[str, str], DraftStats]]) -> Iterable[Metric]:
    """Metrics of the replicas that decode speculatively; nothing if none does."""
    if not replicas:
        return
    yield from _families(CounterMetricFamily, _DRAFT_COUNTERS, replicas)
    by_position = CounterMetricFamily(
        "shardline:spec_decode_num_accepted_tokens_per_pos",
        "Tokens of drafts that were accepted, by their position in the draft.",
        labels=(*_LABELS, "position"),
    )
    for labels, drafts in replicas:
        for position, count in enumerate(drafts.accepted):
            by_position.add_metric((*labels, str(position)), count)
    yield by_position
    costs = GaugeMetricFamily(
        "shardline:spec_decode_row_seconds",
        "Measured seconds that a guess adds to a decode step, by the number of sequences of the step.",
        labels=(*_LABELS, "batch"),
    )
    for labels, drafts in replicas:
        for least, seconds in sorted(drafts.row_seconds.items()):
            costs.add_metric((*labels, "1" if least == 1 else f"{least}-{2 * least - 1}"), seconds)
    yield costs


def _tier_metrics(replicas: Sequence[tuple[tuple[str, str], TierStats]]) -> Iterable[Metric]:
    """Metrics of the replicas whose KV cache has a second tier, by vLLM's names where it has them; nothing if none
    has."""
    if not replicas:
        return
    yield from _families(GaugeMetricFamily, _TIER_GAUGES, replicas)
    yield from _families(CounterMetricFamily, _TIER_COUNTERS, replicas)
    labels_of_transfers = (*_LABELS, "transfer_type")
    num_bytes = CounterMetricFamily(
        "shardline:kv_offload_total_bytes",
        "Bytes of blocks copied between the KV cache and its second tier, over all ranks.",
        labels=labels_of_transfers,
    )
    seconds = CounterMetricFamily(
        "shardline:kv_offload_total_time", "Seconds that ranks spent on these copies.", labels=labels_of_transfers
    )
    for labels, tier in replicas:
        for kind, bytes_of, seconds_of in _TRANSFERS:
            num_bytes.add_metric((*labels, kind), bytes_of(tier.copies))
            seconds.add_metric((*labels, kind), seconds_of(tier.copies))
    yield num_bytes
    yield seconds


def _expert_metrics(replicas: Sequence[tuple[tuple[str, str], ExpertLoad]]) -> Iterable[Metric]:
    """Metrics of the replicas whose model has experts; nothing if none has."""
    if not replicas:
        return
    for name, text, label, values in _EXPERT_COUNTERS:
        counter = CounterMetricFamily(f"shardline:{name}", text, labels=(*_LABELS, label))
        for labels, load in replicas:
            for index, value in enumerate(values(load)):
                counter.add_metric((*labels, str(index)), value)
        yield counter
    yield from _move_metrics([(labels, load.moves) for labels, load in replicas if load.moves is not None])
    yield from _families(GaugeMetricFamily, _EXPERT_GAUGES, replicas)


def _move_metrics(replicas: Sequence[tuple[tuple[str, str], ExpertMoves]]) -> Iterable[Metric]:
    """Metrics of the replicas whose experts move; nothing if none does."""
    if not replicas:
        return
    yield from _families(CounterMetricFamily, _MOVE_COUNTERS, replicas)
    yield from _families(GaugeMetricFamily, _MOVE_GAUGES, replicas)
