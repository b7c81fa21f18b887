"""The figures of a run, with the names and meanings of vLLM's benchmark, and some that it lacks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardline.benchmark.load import RunTrace
from shardline.benchmark.workload import Record

GENERATION_METRICS = ("ttft", "tpot", "itl")
POOLING_METRICS = ("e2el",)
METRIC_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
    "ttft_from_intended": ("TTFT from intended", "TTFT from the Intended Send Time"),
    "e2el_from_intended": ("E2EL from intended", "E2EL from the Intended Send Time"),
}
INTENDED_METRICS = ("ttft_from_intended", "e2el_from_intended")

MAX_LATE_SECONDS = 0.005
"""The 99th percentile of how late requests are sent, above which the client is the limit."""
MAX_CPU_SHARE = 0.9
"""Share of one core that the client may use before it is the limit: it has one thread."""

_SHORT_SECONDS = 0.5
"""A shorter run tells nothing about the processor."""

_DETAILS = (
    "input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors",
)  # fmt: skip
"""Keys with one entry for each request, which --save-detailed keeps."""


@dataclass(frozen=True)
class Wanted:
    pooling: bool = False
    metrics: Sequence[str] = GENERATION_METRICS
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Service level objectives in milliseconds by metric: ttft, tpot, e2el."""
    max_concurrency: int | None = None
    request_rate: float = math.inf
    count_tokens: Callable[[str], int] | None = None
    """Tokens of a text, for servers that report no usage."""

    @property
    def shown_metrics(self) -> list[str]:
        """The metrics that have a meaning: without --max-concurrency nothing queues at the client."""
        queued = self.max_concurrency is not None
        paced = queued and not math.isinf(self.request_rate)
        has = {"client_queue_time": queued, "e2el_including_client_queue": paced}
        streamed = () if not self.pooling else ("ttft", "tpot", "itl")
        return [name for name in self.metrics if has.get(name, True) and name not in streamed]


def summarize(trace: RunTrace, wanted: Wanted) -> dict[str, Any]:
    """The result of a run: keys and values as in the JSON file."""
    records = trace.records
    done = [record for record in records if record.succeeded]
    for record in done:
        if not record.output_tokens and not wanted.pooling:
            count = wanted.count_tokens(record.text) if wanted.count_tokens else len(record.token_times)
            record.output_tokens = count
    result = _pooling_totals(trace, done) if wanted.pooling else _generation_totals(trace, done, wanted)
    result["failed"] = len(records) - len(done)
    result["failures"] = dict(Counter(record.cause for record in records if record.cause).most_common())
    result["first_error"] = next((record.error for record in records if record.cause), None)
    for name in wanted.shown_metrics:
        result |= _statistics(name, _seconds(name, done, wanted), wanted.percentiles)
    for name in _intended(wanted):
        result |= _statistics(name, _seconds(name, done, wanted), sorted({50.0, 99.0, *wanted.percentiles}))
    return result | _client_figures(trace)


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result without the keys that have an entry for every request."""
    return {key: value for key, value in result.items() if key not in _DETAILS}


def percentile_word(percent: float) -> str:
    """99.0 -> "99", 99.9 -> "99.9"."""
    return f"{percent:g}"


def _intended(wanted: Wanted) -> Sequence[str]:
    return INTENDED_METRICS[1:] if wanted.pooling else INTENDED_METRICS


def _generation_totals(trace: RunTrace, done: Sequence[Record], wanted: Wanted) -> dict[str, Any]:
    seconds = trace.seconds
    inputs = sum(record.prompt_len for record in done)
    outputs = sum(record.output_tokens for record in done)
    peak_tokens, peak_requests = _peaks(done)
    good = sum(_is_good(record, wanted.goodput) for record in done)
    return {
        "duration": seconds,
        "completed": len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": good / seconds if wanted.goodput else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "input_lens": [record.prompt_len for record in trace.records],
        "output_lens": [record.output_tokens for record in trace.records],
        "ttfts": [record.ttft for record in trace.records],
        "itls": [record.gaps for record in trace.records],
        "latencies": [record.latency for record in trace.records],
        "start_times": [record.sent for record in trace.records],
        "queue_times": [record.queue_time for record in trace.records],
        "generated_texts": [record.text for record in trace.records],
        "errors": [record.error for record in trace.records],
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "rtfx": 0.0,
    }


def _pooling_totals(trace: RunTrace, done: Sequence[Record]) -> dict[str, Any]:
    inputs = sum(record.prompt_len for record in done)
    sequences = sum(record.num_inputs for record in done)
    return {
        "duration": trace.seconds,
        "completed": len(done),
        "total_input_tokens": inputs,
        "total_input_sequences": sequences,
        "request_throughput": len(done) / trace.seconds,
        "input_sequence_throughput": sequences / trace.seconds,
        "total_token_throughput": inputs / trace.seconds,
        "input_lens": [record.prompt_len for record in trace.records],
        "latencies": [record.latency for record in trace.records],
        "queue_times": [record.queue_time for record in trace.records],
        "errors": [record.error for record in trace.records],
    }


def _peaks(done: Sequence[Record]) -> tuple[float, int]:
    """The most pieces of output that came in one second, and the most requests that ran in one."""
    if not done:
        return 0.0, 0
    start = min(record.sent for record in done)
    count = math.ceil(max(record.end for record in done) - start) + 1
    tokens = np.zeros(count)
    running = np.zeros(count + 1)
    for record in done:
        np.add.at(tokens, (np.asarray(record.token_times) - start).astype(int), 1)
        running[int(record.sent - start)] += 1
        running[int(record.end - start) + 1] -= 1
    return float(tokens.max()), int(np.cumsum(running).max())


def _is_good(record: Record, goodput: Mapping[str, float]) -> bool:
    """Whether a request met every objective; times count from the intended send time."""
    late = record.sent - record.intended
    found = {"ttft": record.ttft + late, "tpot": record.tpot, "e2el": record.latency + late}
    return all(1e3 * found[name] <= limit for name, limit in goodput.items())


def _seconds(name: str, done: Sequence[Record], wanted: Wanted) -> list[float]:
    values: dict[str, Callable[[], list[float]]] = {
        "ttft": lambda: [record.ttft for record in done],
        "tpot": lambda: [record.tpot for record in done if record.output_tokens > 1],
        "itl": lambda: [gap for record in done for gap in record.gaps],
        "e2el": lambda: [record.latency for record in done],
        "client_queue_time": lambda: [record.queue_time for record in done],
        "e2el_including_client_queue": lambda: [record.latency + record.queue_time for record in done],
        "ttft_from_intended": lambda: [record.ttft + record.sent - record.intended for record in done],
        "e2el_from_intended": lambda: [record.end - record.intended for record in done],
    }
    return values[name]()


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds, by their keys."""
    values = 1e3 * np.asarray(seconds or [0.0])
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percent in percentiles:
        found[f"p{percentile_word(percent)}_{name}_ms"] = float(np.percentile(values, percent))
    return found


def _client_figures(trace: RunTrace) -> dict[str, Any]:
    """Whether the client was the limit."""
    late = [record.sent - record.ready for record in trace.records if record.sent] if trace.paced else []
    p99 = float(np.percentile(late, 99)) if late else 0.0
    share = trace.cpu_seconds / trace.seconds if trace.seconds else 0.0
    return {
        "p99_send_lateness_ms": 1e3 * p99,
        "client_cpu_share": share,
        "client_limited": p99 > MAX_LATE_SECONDS or (share > MAX_CPU_SHARE and trace.seconds > _SHORT_SECONDS),
    }
