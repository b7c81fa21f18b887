"""A report as one HTML file that needs no network: charts as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_W, _H, _PAD = 560, 260, 48
_COLORS = ("#2266cc", "#cc5522", "#229955", "#8844bb", "#aa8800", "#118899")
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 1.5rem 0 .3rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } svg { background: #fafafa; border: 1px solid #ddd; }
svg text { font-size: 11px; fill: #444; } table { border-collapse: collapse; } td, th { padding: .15rem .8rem;
border-bottom: 1px solid #eee; text-align: right; } td:first-child, th:first-child { text-align: left; }
.warning { background: #fff3cd; padding: .5rem 1rem; }
"""
_MOST_BARS = 400
"""Requests that the time line shows; of more, an even selection."""


def write_page(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The page of one or several results (label, result). Details of each request are shown if a result has them."""
    charts = [
        ("Throughput against latency", _scatter(results)),
        ("TTFT: share of requests within", _distribution(results, "ttfts", "ms")),
        ("ITL: share of gaps within", _distribution(results, "itls", "ms")),
        ("Time line: waiting for the first token, then decoding", _timeline(results[-1][1])),
        ("Output per second", _rate(results[-1][1])),
    ]
    figures = "".join(f"<figure><h2>{html.escape(title)}</h2>{svg}</figure>" for title, svg in charts if svg)
    warning = ""
    if any(result.get("client_limited") for _, result in results):
        warning = '<p class="warning">The client was the limit in at least one run: see client_cpu_share.</p>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>shardline bench</title>'
        f"<style>{_STYLE}</style></head><body><h1>shardline bench serve</h1>{warning}"
        f'{_figures(results)}<div class="charts">{figures}</div></body></html>\n'
    )


def _figures(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The main figures as a table, one column for each result."""
    keys = [
        "completed", "failed", "duration", "request_throughput", "output_throughput", "total_token_throughput",
        *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el", "e2el_from_intended")
          for kind in ("median", "p99")),
    ]  # fmt: skip
    head = "".join(f"<th>{html.escape(label)}</th>" for label, _ in results)
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
    """One point for each run."""
    points = []
    for index, (label, result) in enumerate(results):
        for run in result.get("runs") or [result]:
            rate = run.get("output_throughput") or run.get("request_throughput") or 0.0
            latency = run.get("median_e2el_from_intended_ms", 0.0)
            points.append((rate, latency, index, label))
    frame = _Frame(max(p[0] for p in points), max(p[1] for p in points), "output tokens/s", "median E2EL (ms)")
    dots = "".join(
        f'<circle cx="{frame.x(rate):.1f}" cy="{frame.y(latency):.1f}" r="4" fill="{_color(index)}">'
        f"<title>{html.escape(label)}: {rate:.1f}, {latency:.1f} ms</title></circle>"
        for rate, latency, index, label in points
    )
    return frame.draw(dots)


def _distribution(results: Sequence[tuple[str, Mapping[str, Any]]], key: str, unit: str) -> str:
    """The cumulative distribution of the values of each result, without its slowest 0.1%."""
    curves = []
    for index, (label, result) in enumerate(results):
        values: list[float] = []
        for one in result.get(key) or ():
            values += one if isinstance(one, list) else [one]
        if values:
            percents = np.linspace(0, 99.9, 200)
            curves.append((index, label, 1e3 * np.percentile(values, percents), percents))
    if not curves:
        return ""
    frame = _Frame(max(float(values[-1]) for _, _, values, _ in curves), 100, unit, "%")
    paths = ""
    for index, label, bounds, percents in curves:
        line = " ".join(f"{frame.x(v):.1f},{frame.y(p):.1f}" for v, p in zip(bounds, percents, strict=True))
        paths += f'<polyline points="{line}" fill="none" stroke="{_color(index)}" stroke-width="1.5">'
        paths += f"<title>{html.escape(label)}</title></polyline>"
    return frame.draw(paths)


def _timeline(result: Mapping[str, Any]) -> str:
    """A bar for each request, from its sending to its end."""
    starts, ttfts, latencies = (result.get(key) or [] for key in ("start_times", "ttfts", "latencies"))
    rows = [row for row in zip(starts, ttfts, latencies, strict=False) if row[0] and row[2]]
    if not rows:
        return ""
    rows.sort()
    rows = rows[:: math.ceil(len(rows) / _MOST_BARS)]
    origin = rows[0][0]
    frame = _Frame(max(start + latency - origin for start, _, latency in rows), len(rows), "s", "requests")
    height = max(0.6, (_H - 2 * _PAD) / len(rows) * 0.8)
    bars = ""
    for place, (start, ttft, latency) in enumerate(rows):
        for begin, length, color in ((0.0, ttft, "#cc5522"), (ttft, latency - ttft, "#2266cc")):
            x = frame.x(start - origin + begin)
            width = max(0.3, frame.x(length) - frame.x(0))
            bars += f'<rect x="{x:.1f}" y="{frame.y(place + 1):.1f}" width="{width:.1f}" height="{height:.2f}" '
            bars += f'fill="{color}"/>'
    return frame.draw(bars)


def _rate(result: Mapping[str, Any]) -> str:
    """Pieces of output in each second."""
    starts, ttfts, itls = (result.get(key) or [] for key in ("start_times", "ttfts", "itls"))
    times: list[float] = []
    for start, ttft, gaps in zip(starts, ttfts, itls, strict=False):
        if ttft:
            times += [float(t) for t in start + ttft + np.cumsum([0.0, *gaps])]
    if not times:
        return ""
    origin = min(start for start in starts if start)
    counts = np.bincount(np.maximum(0, (np.asarray(times) - origin)).astype(int))
    frame = _Frame(len(counts), float(counts.max()), "s", "tokens")
    corners = [(second + side, float(count)) for second, count in enumerate(counts) for side in (0, 1)]
    line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in corners)
    return frame.draw(f'<polyline points="{line}" fill="none" stroke="{_COLORS[0]}" stroke-width="1.5"/>')


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


class _Frame:
    """Axes from 0 to a maximum."""

    def __init__(self, x_max: float, y_max: float, x_label: str, y_label: str) -> None:
        self._x_max = _round_up(x_max)
        self._y_max = _round_up(y_max)
        self._labels = html.escape(x_label), html.escape(y_label)

    def x(self, value: float) -> float:
        """The place of a value on the horizontal axis."""
        return _PAD + (_W - 2 * _PAD) * value / self._x_max

    def y(self, value: float) -> float:
        """The place of a value on the vertical axis."""
        return _H - _PAD - (_H - 2 * _PAD) * value / self._y_max

    def draw(self, content: str) -> str:
        """The chart with this content."""
        ticks = ""
        for part in range(5):
            x_value, y_value = self._x_max * part / 4, self._y_max * part / 4
            x, y = self.x(x_value), self.y(y_value)
            ticks += f'<line x1="{_PAD}" x2="{_W - _PAD}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
            ticks += f'<text x="{x:.1f}" y="{_H - _PAD + 16}" text-anchor="middle">{x_value:g}</text>'
            ticks += f'<text x="{_PAD - 6}" y="{y + 4:.1f}" text-anchor="end">{y_value:g}</text>'
        ticks += f'<text x="{_W - _PAD}" y="{_H - 10}" text-anchor="end">{self._labels[0]}</text>'
        ticks += f'<text x="{_PAD}" y="{_PAD - 14}">{self._labels[1]}</text>'
        return f'<svg width="{_W}" height="{_H}" viewBox="0 0 {_W} {_H}">{ticks}{content}</svg>'


def _round_up(value: float) -> float:
    """The next round number, so that the ticks are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * 0.999999)
