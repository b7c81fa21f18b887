"""A plan as one HTML file that needs no network: plots as SVG, and the text of the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

from shardline.planner.hardware import GIB
from shardline.planner.report import frontier
from shardline.planner.search import Option, Plan, per_million
from shardline.planner.simulation.report import Simulation
from shardline.planner.speed import layout_speed

_WIDTH, _HEIGHT = 640, 320
_LEFT, _BOTTOM = 70, 45
_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_ROOM_FOR_NUMBER = 32
"""Width from which a bar has its number."""
_PARTS = ("weights", "step and libraries", "KV cache")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1f2937;background:#fff}}
h1{{font-size:1.4rem}}h2{{font-size:1.1rem;margin-top:2rem}}
pre{{background:#f3f4f6;padding:1rem;overflow:auto;font-size:12px;border-radius:6px}}
svg{{max-width:100%;height:auto;background:#fff}}svg text{{font-size:12px;fill:#374151}}
.plots{{display:grid;grid-template-columns:repeat(auto-fit,minmax(30rem,1fr));gap:1rem}}
</style></head><body><h1>{title}</h1>
<pre>{text}</pre>
<div class="plots">{plots}</div>
</body></html>
"""


def plan_html(plan: Plan, text: str, simulation: Simulation | None = None) -> str:
    """The page. `text` is the plan as text."""
    fitting = [one for one in plan.options if one.fits]
    plots = []
    if fitting:
        shown = [plan.options[index] for index in frontier(plan.options)][: len(_COLORS)]
        plots = [_frontier_plot(plan, fitting), _memory_plot(fitting[:12]), _cost_plot(plan, shown)]
    if simulation is not None:
        points = [(seconds, 100 * share) for seconds, share in simulation.kv_use]
        plots.append(_figure("KV cache in use", _lines([("simulated", points)], "seconds", "%")))
    title = f"{plan.model.name} on {plan.cluster.name}"
    return _PAGE.format(title=escape(title), text=escape(text), plots="".join(plots))


def _frontier_plot(plan: Plan, fitting: Sequence[Option]) -> str:
    best = set(frontier(plan.options))
    points = []
    for index, one in enumerate(plan.options):
        if one.speed is None:
            continue
        note = f"{one.layout}: TPOT {one.speed.tpot.p50 * 1e3:.1f} ms, {one.speed.output_tok_s.p50:,.0f} tok/s"
        color = _COLORS[1] if index == plan.recommended else _COLORS[0] if index in best else "#9ca3af"
        points.append((1e3 * one.speed.tpot.p50, one.speed.output_tok_s.p50, color, note))
    drawing = _points(points, "TPOT, ms", "output tokens/s")
    title = "Latency against throughput (red: recommended; blue: no layout with the same formats is better in latency, "
    return _figure(title + "throughput and cost together)", drawing)


def _memory_plot(options: Sequence[Option]) -> str:
    """Bars of weights, the rest and the KV cache of each GPU."""
    most = max(one.fit.weight_bytes + one.fit.other_bytes + max(0, one.fit.kv_bytes) for one in options) / GIB
    row, left = 22, 170
    parts = []
    for number, one in enumerate(options):
        x, y = float(left), 10 + row * number
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(str(one.layout))}</text>')
        sizes = (one.fit.weight_bytes, one.fit.other_bytes, one.fit.kv_bytes)
        for name, size, color in zip(_PARTS, sizes, _COLORS, strict=False):
            width = (_WIDTH - left - 20) * max(0, size) / GIB / most
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row - 6}" fill="{color}"><title>{name}: '
                f"{size / GIB:.1f} GiB</title></rect>"
            )
            if width > _ROOM_FOR_NUMBER:
                parts.append(f'<text x="{x + 4:.1f}" y="{y + 13}" style="fill:#fff">{size / GIB:.1f}</text>')
            x += width
    height = 20 + row * len(options)
    legend = "weights (blue), step and libraries (red), KV cache (green): GiB a GPU"
    return _figure(legend, f'<svg viewBox="0 0 {_WIDTH} {height}">{"".join(parts)}</svg>')


def _cost_plot(plan: Plan, options: Sequence[Option]) -> str:
    """Dollars for a million output tokens over the load; tokens per second and GPU where prices are unknown."""
    series = []
    has_prices = all(one.price_per_hour is not None for one in options)
    for one in options:
        points, running = [], 1
        most = layout_speed(
            plan.model,
            one.layout,
            plan.cluster,
            dataclasses.replace(plan.demand, rate=None, running=None),
            one.fit,
            plan.timing[one.layout.engine],
        ).running
        while running <= max(1, most):
            demand = dataclasses.replace(plan.demand, rate=None, running=running)
            timing = plan.timing[one.layout.engine]
            speed = layout_speed(plan.model, one.layout, plan.cluster, demand, one.fit, timing).output_tok_s.p50
            price = one.price_per_hour
            value = speed / one.layout.num_gpus if price is None or not has_prices else per_million(price[1], speed)
            points.append((math.log2(running), value))
            running *= 2
        series.append((str(one.layout), points))
    unit = "$ a million output tokens" if has_prices else "tokens/s a GPU"
    return _figure(f"{unit} over the load", _lines(series, "requests at once", unit, doubles=True))


def _figure(title: str, drawing: str) -> str:
    return f"<figure><figcaption><h2>{escape(title)}</h2></figcaption>{drawing}</figure>"


def _axes(
    xs: Sequence[float], ys: Sequence[float], x_name: str, y_name: str, *, doubles: bool = False
) -> tuple[str, float, float]:
    """(axes with marks, largest x, largest y); both start at zero. If x `doubles`, it is the power of two to show."""
    x_most, y_most = _round_up(max(xs, default=1.0)), _round_up(max(ys, default=1.0))
    if doubles:
        x_most = 4.0 * math.ceil(max(1.0, *xs) / 4)
    right, base = _WIDTH - 20, _HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} 10V{base}H{right}" fill="none" stroke="#374151"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="14" y="{base / 2}" text-anchor="middle" transform="rotate(-90 14 {base / 2})">'
        f"{escape(y_name)}</text>",
    ]
    for mark in range(5):
        x, y = _LEFT + mark / 4 * (right - _LEFT), base - mark / 4 * (base - 10)
        shown = x_most * mark / 4
        x_text = f"{2**shown:.0f}" if doubles else f"{shown:.4g}"
        parts.append(f'<text x="{x}" y="{base + 18}" text-anchor="middle">{x_text}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{y_most * mark / 4:.4g}</text>')
        parts.append(f'<path d="M{_LEFT} {y}H{right}" stroke="#e5e7eb"/>')
    return "".join(parts), x_most, y_most


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 4, 5, 10 times a power of ten."""
    if value <= 0:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 2.5, 4, 5, 10) if step * unit >= value * (1 - 1e-9))


def _place(x: float, y: float, x_most: float, y_most: float) -> tuple[float, float]:
    width, height = _WIDTH - 20 - _LEFT, _HEIGHT - _BOTTOM - 10
    return _LEFT + width * x / x_most, _HEIGHT - _BOTTOM - height * y / y_most


def _points(points: Sequence[tuple[float, float, str, str]], x_name: str, y_name: str) -> str:
    axes, x_most, y_most = _axes([one[0] for one in points], [one[1] for one in points], x_name, y_name)
    dots = []
    for x, y, color, note in points:
        left, top = _place(x, y, x_most, y_most)
        title = f"<title>{escape(note)}</title>"
        dots.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5" fill="{color}" fill-opacity="0.8">{title}</circle>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{axes}{"".join(dots)}</svg>'


def _lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_name: str, y_name: str, *, doubles: bool = False
) -> str:
    every = [point for _, points in series for point in points]
    xs, ys = [one[0] for one in every], [one[1] for one in every]
    axes, x_most, y_most = _axes(xs, ys, x_name, y_name, doubles=doubles)
    parts = []
    for number, (name, points) in enumerate(series):
        color = _COLORS[number % len(_COLORS)]
        path = "L".join("{:.1f} {:.1f}".format(*_place(x, y, x_most, y_most)) for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>' if path else "")
        y = 22 + 15 * number
        parts.append(f'<text x="{_WIDTH - 24}" y="{y}" text-anchor="end" style="fill:{color}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{axes}{"".join(parts)}</svg>'
