"""Results of `shardline bench` as an HTML page with charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from shardline.charts import COLORS, Chart, color, page

_MOST_BARS = 400
"""Requests that the time line shows; of more, an even selection."""


def write_page(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The page of one or several results (label, result). Details of each request are shown if a result has them."""
    charts = [
        ("Throughput against latency", _scatter(results)),
        ("TTFT: share of requests within", _distribution(results, "ttfts")),
        ("ITL: share of gaps within", _distribution(results, "itls")),
        ("Time line: waiting for the first token, then decoding", _timeline(results[-1][1])),
        ("Output per second", _rate(results[-1][1])),
    ]
    warning = ""
    if any(result.get("client_limited") for _, result in results):
        warning = '<p class="warning">The client was the limit in at least one run: see client_cpu_share.</p>'
    return page("shardline bench serve", warning + _figures(results), charts)


def _figures(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The main figures as a table, one column for each result."""
    keys = [
        "completed", "failed", "duration", "request_throughput", "output_throughput", "total_token_throughput",
        *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el", "e2el_from_intended")
          for kind in ("median", "p99")),
    ]  # fmt: skip
    head = "".join(f"<th>{escape(label)}</th>" for label, _ in results)
    rows = []
    for key in keys:
        if not any(isinstance(result.get(key), (int, float)) for _, result in results):
            continue
        cells = "".join(f"<td>{_number(result.get(key))}</td>" for _, result in results)
        rows.append(f"<tr><td>{key}</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _number(value: Any) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, (int, float)) else "-"


def _scatter(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    points = []
    for index, (label, result) in enumerate(results):
        for run in result.get("runs") or [result]:
            rate = run.get("output_throughput") or run.get("request_throughput") or 0.0
            latency = run.get("median_e2el_from_intended_ms", 0.0)
            points.append((rate, latency, color(index), f"{label}: {rate:.1f}, {latency:.1f} ms"))
    ends = max(rate for rate, *_ in points), max(latency for _, latency, *_ in points)
    chart = Chart("output tokens/s", "median E2EL (ms)", *ends)
    for point in points:
        chart.dot(*point)
    return chart.svg()


def _distribution(results: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> str:
    """The cumulative distribution of the seconds of each result, without its slowest 0.1%."""
    percents = np.linspace(0, 99.9, 200)
    curves = []
    for index, (label, result) in enumerate(results):
        values = [value for item in result.get(key) or () for value in (item if isinstance(item, list) else [item])]
        if values:
            curves.append((index, label, 1e3 * np.percentile(values, percents)))
    if not curves:
        return ""
    chart = Chart("ms", "%", max(float(bounds[-1]) for _, _, bounds in curves), 100)
    for index, label, bounds in curves:
        chart.line(zip(bounds, percents, strict=True), index, label)
    return chart.svg()


def _timeline(result: Mapping[str, Any]) -> str:
    """A bar for each request, from its sending to its end."""
    starts, ttfts, latencies = (result.get(key) or [] for key in ("start_times", "ttfts", "latencies"))
    rows = [row for row in zip(starts, ttfts, latencies, strict=False) if row[0] and row[2]]
    if not rows:
        return ""
    rows.sort()
    rows = rows[:: math.ceil(len(rows) / _MOST_BARS)]
    origin = rows[0][0]
    chart = Chart("s", "requests", max(start + latency - origin for start, _, latency in rows), len(rows))
    for place, (start, ttft, latency) in enumerate(rows):
        chart.bar(start - origin, ttft, place + 1, COLORS[1])
        chart.bar(start - origin + ttft, latency - ttft, place + 1, COLORS[0])
    return chart.svg()


def _rate(result: Mapping[str, Any]) -> str:
    starts, ttfts, itls = (result.get(key) or [] for key in ("start_times", "ttfts", "itls"))
    times: list[float] = []
    for start, ttft, gaps in zip(starts, ttfts, itls, strict=False):
        if ttft:
            times += [float(t) for t in start + ttft + np.cumsum([0.0, *gaps])]
    if not times:
        return ""
    origin = min(start for start in starts if start)
    counts = np.bincount(np.maximum(0, (np.asarray(times) - origin)).astype(int))
    chart = Chart("s", "tokens", len(counts), float(counts.max()))
    chart.line([(second + side, float(count)) for second, count in enumerate(counts) for side in (0, 1)], 0)
    return chart.svg()
