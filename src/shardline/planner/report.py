"""A plan as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardline.config.topology import COORDINATES
from shardline.planner.bandwidth import axis_traffic, link_rates
from shardline.planner.commands import plan_commands
from shardline.planner.constants import Interval
from shardline.planner.cost import (
    HOURS_PER_DAY,
    HOURS_PER_MONTH,
    SECONDS_PER_HOUR,
    ApiPrice,
    Costs,
    OtherPrices,
    api_break_even,
    recommended_costs,
)
from shardline.planner.hardware import GB, GIB
from shardline.planner.path import explain_path, turns_yes
from shardline.planner.search import Option, Plan

_SHOWN = 8
_REFUSED = 3


def format_plan(
    plan: Plan, *, show_all: bool = False, api: ApiPrice | None = None, others: OtherPrices | None = None
) -> str:
    """The plan as text."""
    lines = [_head(plan)]
    if plan.model.engine_refusal:
        lines.append(f"vLLM only: {plan.model.engine_refusal}")
    if plan.instead:
        lines.append(plan.instead)
    shown = list(range(len(plan.options))) if show_all else _selection(plan)
    lines += _table(plan, [plan.options[index] for index in shown])
    option = plan.best or next((option for option in plan.options if option.fit.other_bytes), None)
    if option is not None:
        lines += _memory_lines(plan, option) + _bandwidth_lines(plan, option)
    lines += [f"why: {step.question} {step.figures} -> {step.answer}" for step in explain_path(plan)]
    others = others or OtherPrices()
    costs = recommended_costs(plan, others)
    if costs is not None:
        lines.append(_cost_line(costs))
    if api is not None:
        lines.append(_api_line(plan, api, others))
    hidden = len(plan.options) - len(shown)
    if hidden:
        lines.append(f"{hidden} dominated or refused layouts: --all")
    lines += [
        f"run: {command.line}{command.note and f'   # {command.note}'}"
        for command in plan_commands(plan).values()
        if command
    ]
    return "\n".join(lines)


def _memory_json(plan: Plan, option: Option) -> dict[str, Any]:
    """The memory of the fullest GPU of a layout, part by part, in bytes, and what fits its KV cache."""
    fitted, total = option.fit, plan.cluster.part(option.layout.num_gpus).smallest.usable_bytes
    return {
        "layout": str(option.layout),
        "gpu_bytes": total,
        "weight_bytes": fitted.weight_bytes,
        "other_bytes": fitted.other_bytes,
        "kv_bytes": fitted.kv_bytes,
        "unused_bytes": total - fitted.weight_bytes - fitted.other_bytes - fitted.kv_bytes,
        "kv_bytes_per_token": fitted.kv_bytes / fitted.kv_tokens if fitted.kv_tokens > 0 else None,
        "kv_tokens": fitted.kv_tokens,
        "max_context": fitted.max_context,
    }


def _memory_lines(plan: Plan, option: Option) -> list[str]:
    """The memory of a GPU line by line, and the longest context."""
    memory, fitted = _memory_json(plan, option), option.fit
    per_token = memory["kv_bytes_per_token"]
    tokens = "" if per_token is None else f"   {fitted.kv_tokens:,} tokens of {per_token / 1e3:,.1f} kB"
    rows = (
        ("weights", fitted.weight_bytes, ""),
        ("step and libraries", fitted.other_bytes, ""),
        ("KV cache", fitted.kv_bytes, tokens if fitted.kv_bytes >= 0 else "   so much is missing"),
        ("unused", memory["unused_bytes"], f"   --gpu-memory-utilization {plan.demand.utilization:g}"),
    )
    limit = " (all positions of the model)" * (fitted.max_context == plan.model.spec.max_position_embeddings)
    return [
        f"memory of a GPU with {option.layout}, {memory['gpu_bytes'] / GIB:.1f} GiB:",
        *(f"  {name:20}{num_bytes / GIB:>8.1f} GiB{note}" for name, num_bytes, note in rows),
        f"longest context: {fitted.max_context:,} tokens{limit}; {fitted.requests} requests of "
        f"{plan.demand.max_model_len:,} tokens fit at once",
    ]


def _bandwidth_lines(plan: Plan, option: Option) -> list[str]:
    """For each axis, what a GPU receives, and how long that takes over each link."""
    if option.speed is None:
        return []
    head = "".join(f"{name:>14}" for name in link_rates(plan))
    lines = [
        f"links: what a GPU receives along each axis, and ms in a decode step with {option.speed.running:,.0f} "
        f"requests, whose other parts take {1e3 * option.speed.other_seconds:.1f} ms",
        f"  {'axis':8}{'kB a token':>12}{'exchanges':>11}{'MB a step':>11}{head}",
    ]
    for traffic in axis_traffic(plan, option):
        cells = "".join(f"{1e3 * seconds:>14.2f}" for seconds in traffic.link_seconds.values())
        lines.append(
            f"  {traffic.axis:8}{traffic.bytes_per_token / 1e3:>12,.1f}{traffic.exchanges:>11}"
            f"{traffic.step_bytes / 1e6:>11,.2f}{cells}"
        )
    return lines


def _bandwidth_json(plan: Plan, option: Option) -> list[dict[str, Any]]:
    return [asdict(traffic) for traffic in axis_traffic(plan, option)] if option.speed is not None else []


def _cost_line(costs: Costs) -> str:
    parts = []
    if costs.traffic_gb_per_month:
        price = f" for ${costs.traffic_per_month:,.0f}" if costs.traffic_per_month else ""
        parts.append(f"{costs.traffic_gb_per_month:,.0f} GB between nodes{price}")
    if costs.operations_per_month:
        parts.append(f"${costs.operations_per_month:,.0f} for operations")
    included = f" ({', '.join(parts)} included)" if parts else ""
    return (
        f"cost: ${costs.per_hour:.2f} an hour; ${costs.per_month:,.0f}, {costs.gpu_hours_per_month:,.0f} GPU-hours a "
        f"month{included}; a million output tokens ${costs.output_per_million:.2f} at this load and "
        f"${costs.full_output_per_million:.2f} at full load, input tokens ${costs.input_per_million:.2f} and "
        f"${costs.full_input_per_million:.2f}"
    )


def _api_line(plan: Plan, api: ApiPrice, others: OtherPrices) -> str:
    tokens = api_break_even(plan, api, others)
    if tokens is None:
        return "why: an API? nothing to compare it with -> an API"
    most = _tokens_a_day(plan)
    answer = f"GPUs from {tokens / 1e6:,.1f} million tokens a day, an API below"
    if math.isinf(tokens):
        answer = "an API: the traffic between nodes alone costs more"
    elif tokens > most:
        answer = f"an API: the layout makes at most {most / 1e6:,.1f} million tokens a day"
    cached = f", {plan.demand.cached_len} of {plan.demand.input_len} input tokens cached" * (plan.demand.cached_len > 0)
    return f"why: an API? {api.per_token(plan.demand) * 1e6:.2f} dollars for a million mean tokens{cached} -> {answer}"


def _tokens_a_day(plan: Plan) -> float:
    assert plan.best is not None
    speed = plan.best.speed
    assert speed is not None
    share = (plan.demand.input_len + plan.demand.output_len) / plan.demand.output_len
    return speed.output_tok_s.p50 * share * HOURS_PER_DAY * SECONDS_PER_HOUR


def plan_json(plan: Plan, api: ApiPrice | None = None, others: OtherPrices | None = None) -> dict[str, Any]:
    """The plan as JSON data. Times are milliseconds, prices US dollars, sizes bytes."""
    others = others or OtherPrices()
    costs, commands = recommended_costs(plan, others), plan_commands(plan)
    tokens = None if api is None else api_break_even(plan, api, others)
    return {
        "api_break_even_tokens_a_day": None if tokens is None or math.isinf(tokens) else tokens,
        "model": plan.model.name,
        "gpus": plan.cluster.name,
        "vllm_only": plan.model.engine_refusal or plan.instead or None,
        "layouts": [
            option_json(option) | ({"turns_yes": turns_yes(plan, option)} if option.speed is None else {})
            for option in plan.options
        ],
        "recommended": plan.recommended,
        "memory": None if plan.best is None else _memory_json(plan, plan.best),
        "bandwidth": [] if plan.best is None else _bandwidth_json(plan, plan.best),
        "costs": None if costs is None else asdict(costs),
        "path": [asdict(step) for step in explain_path(plan)],
        "commands": {engine: command and command.line for engine, command in commands.items()},
        "command_notes": {engine: (command and command.note) or None for engine, command in commands.items()},
    }


def _head(plan: Plan) -> str:
    cluster = plan.cluster
    nodes = "one node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes, "
    if cluster.num_nodes > 1:
        nodes += f"{cluster.network_bytes_per_second / GB:g} GB/s each way between them"
    link = f"{cluster.link.kind} {cluster.link.gbs:g} GB/s each way"
    if cluster.link.pair_gbs < cluster.link.gbs:
        link += f" ({cluster.link.pair_gbs:g} between two)"
    return f"{plan.model.name} on {cluster.name}, {nodes}, {link}, {cluster.smallest.usable_gib:.4g} GiB usable"


def _selection(plan: Plan) -> list[int]:
    """The undominated options, and a few that are refused, for different reasons."""
    best = frontier(plan.options)[:_SHOWN]
    if plan.recommended is not None and plan.recommended not in best:
        best = [plan.recommended, *best]
    refused = [index for index, option in enumerate(plan.options) if option.speed is None]
    refused.sort(key=lambda index: _refusal_rank(plan.options[index]))
    reasons = {plan.options[index].fit.why_not: index for index in reversed(refused)}
    spread = [index for index, option in enumerate(plan.options) if option.speed is not None and not option.fits]
    return best + spread[:1] + [index for index in refused if index in reasons.values()][:_REFUSED]


def _refusal_rank(option: Option) -> tuple[bool, int, int]:
    """Sort key: refusals for lack of memory before those of the shape, the nearest to fit first."""
    return not option.fit.other_bytes, -option.fit.max_context, -option.fit.kv_bytes


def _table(plan: Plan, options: Sequence[Option]) -> list[str]:
    length = f"{plan.demand.max_model_len:,} reqs"
    lines = [
        f"{'layout':26} {'per GPU: weights+KV':20} {'verdict':12} {length:>13} {'TTFT s':>11} {'TPOT ms':>10} "
        f"{'tok/s':>8} {'$/M out':>8}  bound by"
    ]
    for option in options:
        size = _memory(option)
        if option.speed is None:
            lines.append(f"{option.layout!s:26} {size:20} no: {option.fit.why_not}")
            continue
        speed, data = option.speed, option.layout.data
        requests = f"{option.fit.requests}" if data == 1 else f"{data}x{option.fit.requests // data}"
        cost = "-" if option.cost_per_million is None else f"{option.cost_per_million:.2f}"
        note = f"; misses {option.misses}" if option.misses else ""
        note += f"; may miss {option.may_miss}" if option.may_miss else ""
        note = f"; {option.fit.why_not}" if not option.fits else note
        lines.append(
            f"{option.layout!s:26} {size:20} {option.fit.verdict:12} {requests:>13} {_span(speed.ttft, 1, 2):>11} "
            f"{_span(speed.tpot, 1e3, 0):>10} {speed.output_tok_s.p50:>8.0f} {cost:>8}  {speed.bound_by}; links "
            f"{speed.link_share:.0%}{note}"
        )
    return lines


def _memory(option: Option) -> str:
    """Weights, and the KV cache of a layout whose memory was counted."""
    if not option.fit.weight_bytes:
        return "-"
    cache = f"+{max(0, option.fit.kv_bytes) / GIB:.0f}" if option.fit.other_bytes else ""
    return f"{option.fit.weight_bytes / GIB:.1f}{cache} GiB"


def _span(interval: Interval, factor: float, digits: int) -> str:
    return f"{interval.p10 * factor:.{digits}f}-{interval.p90 * factor:.{digits}f}"


def option_json(option: Option) -> dict[str, Any]:
    """A layout with its figures as JSON data."""
    layout, fitted, speed = option.layout, option.fit, option.speed
    data: dict[str, Any] = {
        "engine": layout.engine,
        **{COORDINATES[axis]: size for axis, size in layout.sizes.items()},
        "ep": layout.expert_ranks,
        "weights": layout.weights,
        "kv": layout.kv,
        "verdict": fitted.verdict,
        "weight_bytes": fitted.weight_bytes or None,
        "kv_bytes": fitted.kv_bytes,
        "kv_tokens": fitted.kv_tokens,
        "max_context": fitted.max_context,
        "concurrency": round(fitted.concurrency, 2),
        "requests": fitted.requests,
        "why_not": fitted.why_not or option.misses or None,
        "may_miss": option.may_miss or None,
        "price_per_hour": option.price_per_hour,
        "cost_per_million": option.cost_per_million,
        "cost_per_month": None if option.price_per_hour is None else option.price_per_hour[1] * HOURS_PER_MONTH,
        "ttft_ms": None,
        "tpot_ms": None,
        "output_tok_s": None,
        "bound_by": None,
        "link_share": None,
        "running": None,
    }
    if speed is not None:
        data |= {
            "ttft_ms": _interval_json(speed.ttft, 1e3),
            "tpot_ms": _interval_json(speed.tpot, 1e3),
            "output_tok_s": _interval_json(speed.output_tok_s, 1.0),
            "bound_by": speed.bound_by,
            "link_share": round(speed.link_share, 4),
            "running": round(speed.running, 1),
        }
    return data


def _interval_json(interval: Interval, factor: float) -> dict[str, float]:
    return {name: round(value * factor, 3) for name, value in interval._asdict().items()}


def frontier(options: tuple[Option, ...]) -> list[int]:
    """Indices of the options that no other with the same formats beats in latency, throughput and cost together."""
    kept: list[int] = []
    for index, option in enumerate(options):
        if not option.fits:
            continue
        mine = _figures(option)
        formats = (option.layout.weights, option.layout.kv)
        others = (
            _figures(other)
            for other in options
            if other.fits and other is not option and (other.layout.weights, other.layout.kv) == formats
        )
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others):
            kept.append(index)
    return kept


def _figures(option: Option) -> tuple[float, ...]:
    speed = option.speed
    assert speed is not None
    cost = option.cost_per_million or option.layout.num_gpus / speed.output_tok_s.p50
    return (float(bool(option.misses)), speed.tpot.p50, -speed.output_tok_s.p50, cost)
