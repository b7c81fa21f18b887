"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardline.config.topology import COORDINATES
from shardline.models.sizes import stage_spans
from shardline.planner import vllm
from shardline.planner.commands import plan_commands
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
from shardline.planner.layout import Layout
from shardline.planner.memory import stored_weights
from shardline.planner.path import explain_path, turns_yes
from shardline.planner.search import Option, Plan
from shardline.planner.speed import layout_work
from shardline.planner.timing import Interval

_WIDTH = 100
"""Columns of a page."""
_SHOWN = 5
"""Layouts of the table."""
_EXPANDED = 1.3
"""Weights that are so many times larger than stored are expanded."""
_REFUSED = 3
"""Refused layouts of the table, if nothing fits."""


def format_plan(
    plan: Plan, *, show_all: bool = False, api: ApiPrice | None = None, others: OtherPrices | None = None
) -> str:
    """The plan as a page: what is recommended, its memory, the path to it, and the runners-up.

    With `show_all`, every layout is in the table, and each question of the path has its figures.
    """
    lines = _wrap(_head(plan))
    if plan.model.engine_refusal:
        lines += _wrap(f"vLLM only: {plan.model.engine_refusal}")
    lines += _wrap(plan.instead) if plan.instead else []
    best, others = plan.best, others or OtherPrices()
    lines += ["", *(_recommendation(plan, best, api, others) if best is not None else ["nothing is recommended"])]
    option = best or next((option for option in plan.options if option.fit.other_bytes), None)
    if option is not None:
        if lacking := expanded_weights(plan, option):
            lines += _wrap(f"missing: {lacking}")
        lines += ["", *_memory_lines(plan, option), *_bandwidth_lines(plan, option), ""]
    for step in explain_path(plan):
        question = step.question if show_all else step.question.partition(" (")[0]
        lines += _wrap(f"{question} {step.answer}")
        lines += _wrap(step.figures, "    ") if show_all else []
    shown = list(range(len(plan.options))) if show_all else _selection(plan)
    lines += ["", *_table(plan, [plan.options[index] for index in shown])]
    hidden = len(plan.options) - len(shown)
    return "\n".join([*lines, *[f"{hidden} more layouts, and the figures of each answer: --all"] * bool(hidden)])


def _wrap(text: str, indent: str = "") -> list[str]:
    """Lines of the page; words, such as those of a command, stay whole."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _recommendation(plan: Plan, best: Option, api: ApiPrice | None, others: OtherPrices) -> list[str]:
    """The commands, what fits, how fast it is, and what it costs."""
    speed, fitted = best.speed, best.fit
    assert speed is not None
    lines = [f"recommended: {best.layout}"]
    for command in plan_commands(plan).values():
        if command is not None:
            line = _wrap(f"$ {command.line}", "  ")
            lines += [*(f"{part} \\" for part in line[:-1]), line[-1]]
            lines += _wrap(f"# {command.note}", "    ") if command.note else []
    fewer = "" if best.fit.verdict != "tight" else f", fewer than {plan.demand.concurrency}"
    lines += _wrap(
        f"fits:  {fitted.requests} requests of {plan.demand.max_model_len:,} tokens at once{fewer} ({fitted.verdict})"
    )
    risk = f"; may miss {best.may_miss}" if best.may_miss else ""
    lines += _wrap(
        f"speed: {speed.output_tok_s.p50:,.0f} tok/s with {speed.running:,.0f} requests, "
        f"TTFT {_span(speed.ttft, 1, 2)} s, TPOT {_span(speed.tpot, 1e3, 0)} ms; bound by {speed.bound_by}{risk}"
    )
    costs = recommended_costs(plan, others)
    lines += _wrap(_cost_line(costs)) if costs is not None else []
    return lines + (_wrap(_api_line(plan, api, others)) if api is not None else [])


def expanded_weights(plan: Plan, option: Option) -> str:
    """What this engine lacks if it expands a checkpoint's quantized weights on GPUs; empty: it keeps them packed."""
    layout, fitted = option.layout, option.fit
    if layout.engine != "shardline" or not plan.model.rules.rules or not fitted.weight_bytes:
        return ""
    stages = fitted.stages or stage_spans(plan.model.spec, layout.pipeline)
    packed, _ = vllm.weight_bytes(plan.model, stored_weights(plan.model, layout.weights), layout, stages)
    if fitted.weight_bytes < _EXPANDED * packed:
        return ""
    return (
        f"GPU kernels of Shardline that keep these {layout.weights} weights packed. It expands them: "
        f"{fitted.weight_bytes / GIB:.0f} GiB a GPU instead of {packed / GIB:.0f}; --engine vllm keeps them packed"
    )


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
        f"longest context: {fitted.max_context:,} tokens{limit}",
    ]


def _bandwidth_lines(plan: Plan, option: Option) -> list[str]:
    """For each axis, what a GPU receives, and how long that takes over each link."""
    if option.speed is None:
        return []
    head = "".join(f"{name:>14}" for name in link_rates(plan))
    lines = [
        f"links: what a GPU receives along each axis, and ms of a decode step (others: "
        f"{1e3 * option.speed.other_seconds:.1f} ms)",
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
        f"price: ${costs.per_hour:.2f} an hour; ${costs.per_month:,.0f}, {costs.gpu_hours_per_month:,.0f} GPU-hours a "
        f"month{included}; a million output tokens ${costs.output_per_million:.2f} at this load and "
        f"${costs.full_output_per_million:.2f} at full load, input tokens ${costs.input_per_million:.2f} and "
        f"${costs.full_input_per_million:.2f}"
    )


def _api_line(plan: Plan, api: ApiPrice, others: OtherPrices) -> str:
    tokens = api_break_even(plan, api, others)
    if tokens is None:
        return "an API? nothing to compare it with"
    most = _tokens_a_day(plan)
    answer = f"GPUs from {tokens / 1e6:,.1f} million tokens a day, an API below"
    if math.isinf(tokens):
        answer = "an API: the traffic between nodes alone costs more"
    elif tokens > most:
        answer = f"an API: the layout makes at most {most / 1e6:,.1f} million tokens a day"
    cached = f", {plan.demand.cached_len} of {plan.demand.input_len} input tokens cached" * (plan.demand.cached_len > 0)
    return f"an API? {api.per_token(plan.demand) * 1e6:.2f} dollars for a million mean tokens{cached}: {answer}"


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
        "missing": (expanded_weights(plan, plan.options[0]) or None) if plan.options else None,
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
    """The undominated options; if nothing fits, some that are refused, for different reasons."""
    if best := frontier(plan.options)[:_SHOWN]:
        first = [] if plan.recommended is None or plan.recommended in best else [plan.recommended]
        return [*first, *best]
    refused = [index for index, option in enumerate(plan.options) if option.speed is None]
    refused.sort(key=lambda index: _refusal_rank(plan.options[index]))
    reasons = {plan.options[index].fit.why_not: index for index in reversed(refused)}
    return [index for index in refused if index in reasons.values()][:_REFUSED]


def _refusal_rank(option: Option) -> tuple[bool, int, int]:
    """Sort key: refusals for lack of memory before those of the shape, the nearest to fit first."""
    return not option.fit.other_bytes, -option.fit.max_context, -option.fit.kv_bytes


def _table(plan: Plan, options: Sequence[Option]) -> list[str]:
    length = f"{plan.demand.max_model_len:,} reqs"
    width = max([len("layout"), *(len(str(option.layout)) for option in options)])
    lines = [
        f"{'layout':{width}} {'GPU: GiB':>9} {length} {'TTFT s':>11} {'TPOT ms':>9} "
        f"{'tok/s':>7} {'$/M out':>7}  bound by"
    ]
    for option in options:
        size = _memory(option)
        if option.speed is None:
            lines += _wrap(f"{option.layout!s:{width}} {size:>9} no: {option.fit.why_not}")
            continue
        speed, data = option.speed, option.layout.data
        requests = f"{option.fit.requests}" if data == 1 else f"{data}x{option.fit.requests // data}"
        cost = "-" if option.cost_per_million is None else f"{option.cost_per_million:.2f}"
        lines.append(
            f"{option.layout!s:{width}} {size:>9} {requests:>{len(length)}} {_span(speed.ttft, 1, 2):>11} "
            f"{_span(speed.tpot, 1e3, 0):>9} {speed.output_tok_s.p50:>7.0f} {cost:>7}  {speed.bound_by}"
        )
        note = "; ".join(
            text for text in (
                "tight" if option.fit.verdict == "tight" else "",
                f"misses {option.misses}" if option.misses else "",
                f"may miss {option.may_miss}" if option.may_miss else "",
                "" if option.fits else option.fit.why_not,
            ) if text
        )  # fmt: skip
        lines += _wrap(note, "  ") if note else []
    return lines


def _memory(option: Option) -> str:
    """Weights, and the KV cache of a layout whose memory was counted."""
    if not option.fit.weight_bytes:
        return "-"
    cache = f"+{max(0, option.fit.kv_bytes) / GIB:.0f}" if option.fit.other_bytes else ""
    return f"{option.fit.weight_bytes / GIB:.1f}{cache}"


def _span(interval: Interval, factor: float, digits: int) -> str:
    return f"{interval.p10 * factor:.{digits}f}-{interval.p90 * factor:.{digits}f}"


def option_json(option: Option) -> dict[str, Any]:
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


@dataclass(frozen=True)
class AxisTraffic:
    """What one GPU receives if its model is divided along one axis only."""

    axis: str
    """The axis and its ranks, such as "tp4"."""
    bytes_per_token: float
    """For each token that the GPU computes."""
    exchanges: int
    """Of a step, one after the other."""
    step_bytes: float
    """In a decode step with the option's requests."""
    link_seconds: Mapping[str, float]
    """For each link, the time of the exchanges of a decode step."""


def axis_traffic(plan: Plan, option: Option) -> list[AxisTraffic]:
    """The traffic of every axis over as many GPUs as the option has, but at least two, with its formats and load."""
    assert option.speed is not None
    ranks, running = max(2, option.layout.num_gpus), option.speed.running
    constants = plan.timing[option.layout.engine].constants
    axes = []
    for axis, layout in _axes(plan, option, ranks):
        stages = stage_spans(plan.model.spec, layout.pipeline)
        try:
            work = layout_work(plan.model, layout, dataclasses.replace(option.fit, layout=layout, stages=stages))
        except ValueError:
            continue  # the heads cannot be divided so
        traffic = sum((exchange for exchange, _ in work.exchanges), work.hand_off)
        # Stages and replicas each have a part of the requests in a step.
        moved = traffic.num_bytes * running / (layout.pipeline * layout.data)
        waiting = traffic.num_messages * constants.message
        seconds = {name: waiting + moved / constants.link / rate for name, rate in link_rates(plan).items()}
        axes.append(AxisTraffic(f"{axis}{ranks}", traffic.num_bytes, traffic.num_messages, moved, seconds))
    return axes


def _axes(plan: Plan, option: Option, ranks: int) -> Iterator[tuple[str, Layout]]:
    for axis, name in COORDINATES.items():
        is_possible = axis != "pipeline" or ranks <= len(plan.model.spec.layers)
        if is_possible and (axis != "context" or option.layout.engine == "shardline"):
            yield name, option.layout.along(**{axis: ranks})
    if any(layer.feed_forward.routing for layer in plan.model.spec.layers):
        yield "ep", dataclasses.replace(option.layout.along(data=ranks), whole_experts=True)


def link_rates(plan: Plan) -> dict[str, float]:
    """Bytes per second of one direction of each link: that of a node, that of a host, and the network between nodes."""
    cluster = plan.cluster
    links = [
        (cluster.link.kind, cluster.link.gbs),
        ("pcie", cluster.slowest.pcie_gbs),
        ("network", cluster.network_bytes_per_second / GB),
    ]
    return {f"{kind} {gbs:g}": gbs * GB for kind, gbs in links}
