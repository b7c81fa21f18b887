"""A plan as an HTML page: its text, and charts of its layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

from shardline.charts import COLORS, GREY, Chart, page, stacked_bars
from shardline.planner.hardware import GIB
from shardline.planner.report import frontier
from shardline.planner.search import Option, Plan, per_million
from shardline.planner.simulation.report import Simulation
from shardline.planner.speed import Speed, layout_speed

_MEMORY_ROWS = 12
"""Layouts whose memory is drawn."""


def plan_html(plan: Plan, text: str, simulation: Simulation | None = None) -> str:
    """The page. `text` is the plan as text."""
    charts = []
    fitting = [option for option in plan.options if option.fits]
    if fitting:
        best = [plan.options[index] for index in frontier(plan.options)]
        charts = [_frontier_chart(plan, best), _memory_chart(fitting[:_MEMORY_ROWS])]
        charts.append(_cost_chart(plan, best[: len(COLORS)]))
    if simulation is not None:
        charts.append(_cache_chart(simulation))
    return page(f"{plan.model.name} on {plan.cluster.name}", f"<pre>{escape(text)}</pre>", charts)


def _frontier_chart(plan: Plan, best: Sequence[Option]) -> tuple[str, str]:
    points = []
    for option in plan.options:
        if option.speed is not None:
            tpot, rate = 1e3 * option.speed.tpot.p50, option.speed.output_tok_s.p50
            fill = COLORS[1] if option is plan.best else COLORS[0] if option in best else GREY
            points.append((tpot, rate, fill, f"{option.layout}: TPOT {tpot:.1f} ms, {rate:,.0f} tok/s"))
    chart = Chart("TPOT, ms", "output tokens/s", max(x for x, *_ in points), max(y for _, y, *_ in points))
    for point in points:
        chart.dot(*point)
    title = "Latency against throughput (red: recommended; blue: no layout with the same formats is better in latency, "
    return title + "throughput and cost together)", chart.svg()


def _memory_chart(options: Sequence[Option]) -> tuple[str, str]:
    """Bars of weights, the rest and the KV cache of each GPU."""
    rows = []
    for option in options:
        sizes = (option.fit.weight_bytes, option.fit.other_bytes, max(0, option.fit.kv_bytes))
        names = ("weights", "step and libraries", "KV cache")
        rows.append((str(option.layout), [(name, size / GIB) for name, size in zip(names, sizes, strict=True)]))
    title = "weights (blue), step and libraries (red), KV cache (green): GiB a GPU"
    return title, stacked_bars(rows, "GiB")


def _cost_chart(plan: Plan, options: Sequence[Option]) -> tuple[str, str]:
    """Dollars for a million output tokens over the load; tokens per second and GPU where prices are unknown."""
    has_prices = all(option.price_per_hour is not None for option in options)

    def speed(option: Option, running: int | None) -> Speed:
        demand, timing = dataclasses.replace(plan.demand, rate=None, running=running), plan.timing[option.layout.engine]
        return layout_speed(plan.model, option.layout, plan.cluster, demand, option.fit, timing)

    series = []
    for option in options:
        points = []
        for power in range(int(math.log2(max(1.0, speed(option, None).running))) + 1):
            rate, price = speed(option, 2**power).output_tok_s.p50, option.price_per_hour
            value = rate / option.layout.num_gpus if price is None or not has_prices else per_million(price[1], rate)
            points.append((float(power), value))
        series.append((str(option.layout), points))
    unit = "$ a million output tokens" if has_prices else "tokens/s a GPU"
    every = [point for _, points in series for point in points]
    chart = Chart("requests at once", unit, max(x for x, _ in every), max(y for _, y in every), doubles=True)
    for index, (name, points) in enumerate(series):
        chart.line(points, index, name)
    return f"{unit} over the load", chart.svg()


def _cache_chart(simulation: Simulation) -> tuple[str, str]:
    points = [(seconds, 100 * share) for seconds, share in simulation.kv_use]
    ends = [max((point[axis] for point in points), default=1.0) for axis in (0, 1)]
    chart = Chart("seconds", "%", *ends)
    chart.line(points, 0, "simulated")
    return "KV cache in use", chart.svg()
