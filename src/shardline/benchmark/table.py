"""The printed table of a run: vLLM's rows, in its order, and sections of our own after them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardline.benchmark.results import METRIC_TITLES, Wanted, percentile_word

_WIDTH = 50

_GENERATION_ROWS = (
    ("Total input tokens:", "total_input_tokens", ""),
    ("Total generated tokens:", "total_output_tokens", ""),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)
_POOLING_ROWS = (
    ("Total input tokens:", "total_input_tokens", ""),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Input throughput (inputs/s):", "input_sequence_throughput", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)


def table_lines(result: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    yield _title(" Serving Benchmark Result ", "=")
    yield _row("Successful requests:", result["completed"])
    yield _row("Failed requests:", result["failed"])
    if wanted.max_concurrency is not None:
        yield _row("Maximum request concurrency:", wanted.max_concurrency)
    if not math.isinf(wanted.request_rate):
        yield _row("Request rate configured (RPS):", wanted.request_rate, ".2f")
    yield _row("Benchmark duration (s):", result["duration"], ".2f")
    for label, key, form in _POOLING_ROWS if wanted.pooling else _GENERATION_ROWS:
        if result[key] is not None:
            yield _row(label, result[key], form)
    for name in wanted.shown_metrics:
        short, title = METRIC_TITLES[name]
        yield _title(title, "-")
        yield from _statistics(result, name, short, wanted.percentiles)
    if "spec_decode_num_drafts" in result:
        yield from _drafts(result)
    if "bubble" in result:
        yield from _ranks(result)
    yield from _own_sections(result, wanted)
    yield "=" * _WIDTH


def _drafts(result: Mapping[str, Any]) -> Iterator[str]:
    yield _title("Speculative Decoding", "-")
    yield _row("Acceptance rate (%):", result["spec_decode_acceptance_rate"], ".2f")
    yield _row("Acceptance length:", result["spec_decode_acceptance_length"], ".2f")
    yield _row("Drafts:", result["spec_decode_num_drafts"])
    yield _row("Draft tokens:", result["spec_decode_draft_tokens"])
    yield _row("Accepted tokens:", result["spec_decode_accepted_tokens"])
    yield "Per-position acceptance (%):"
    for position, share in enumerate(result["spec_decode_per_position_acceptance_rates"]):
        yield _row(f"  Position {position}:", 100 * share, ".2f")


def _ranks(result: Mapping[str, Any]) -> Iterator[str]:
    yield _title("Ranks", "-")
    rows = zip(result["ranks"], result["rank_busy_shares"], result["rank_waiting_shares"], strict=True)
    for name, busy, waiting in rows:
        yield _row(f"Rank {name} busy, waiting (%):", f"{100 * busy:.1f}, {100 * waiting:.1f}")
    yield _row("Bubble, time not busy (%):", 100 * result["bubble"], ".1f")


def _own_sections(result: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    yield _title("From the Intended Send Time", "-")
    for name in ("ttft_from_intended", "e2el_from_intended"):
        if f"mean_{name}_ms" in result:
            yield from _statistics(result, name, METRIC_TITLES[name][0].split(" ")[0], wanted.percentiles)
    if result["failures"]:
        yield _title("Failures by Cause", "-")
        for cause, count in result["failures"].items():
            yield _row(f"{cause}:", count)
        yield f"The first failure: {result['first_error']}"
    if result["client_limited"]:
        yield "-" * _WIDTH
        yield (
            f"The client is the limit: it used {100 * result['client_cpu_share']:.0f}% of a core, and sent 1% of the "
            f"requests more than {result['p99_send_lateness_ms']:.1f} ms late."
        )


def _statistics(result: Mapping[str, Any], name: str, short: str, percentiles: Sequence[float]) -> Iterator[str]:
    yield _row(f"Mean {short} (ms):", result[f"mean_{name}_ms"], ".2f")
    yield _row(f"Median {short} (ms):", result[f"median_{name}_ms"], ".2f")
    for percent in percentiles:
        word = percentile_word(percent)
        yield _row(f"P{word} {short} (ms):", result[f"p{word}_{name}_ms"], ".2f")


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{_WIDTH}}"


def _row(label: str, value: Any, form: str = "") -> str:
    return f"{label:<40} {value:<10{form}}"
