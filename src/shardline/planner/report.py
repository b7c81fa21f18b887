"""A plan as JSON data, and the figures that its page shows too: memory, what nothing beats, what each axis moves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardline.config.topology import COORDINATES
from shardline.models.sizes import stage_spans
from shardline.planner.commands import plan_commands
from shardline.planner.cost import HOURS_PER_MONTH, ApiPrice, OtherPrices, api_break_even, recommended_costs
from shardline.planner.hardware import GB, GIB
from shardline.planner.layout import STARTED_AXES, Demand, Layout
from shardline.planner.memory import Fit, packed_bytes
from shardline.planner.path import explain_path, turns_yes
from shardline.planner.search import Option, Plan, missing_kernels
from shardline.planner.speed import layout_work
from shardline.planner.timing import Interval


def missing_weights(plan: Plan, fitted: Fit) -> str:
    """What this engine lacks if it expands a checkpoint's quantized weights on GPUs; empty: it keeps them packed."""
    packed = packed_bytes(plan.model, fitted)
    return missing_kernels(fitted, packed) + "; --engine vllm keeps them packed" if packed else ""


def plan_memory(plan: Plan, option: Option) -> dict[str, Any]:
    """The memory of the fullest GPU of a layout, part by part, in bytes, and what fits its KV cache."""
    fitted, total = option.fit, plan.cluster.part(option.layout.num_gpus).smallest.usable_bytes
    lora_bytes, _ = fitted.lora_memory
    return {
        "layout": str(option.layout),
        "gpu_bytes": total,
        "weight_bytes": fitted.weight_bytes,
        "other_bytes": fitted.other_bytes,
        "lora_bytes": lora_bytes,
        "kv_bytes": fitted.kv_bytes,
        "unused_bytes": total - fitted.weight_bytes - fitted.other_bytes - lora_bytes - fitted.kv_bytes,
        "kv_bytes_per_token": fitted.kv_bytes / fitted.kv_tokens if fitted.kv_tokens > 0 else None,
        "kv_tokens": fitted.kv_tokens,
        "max_context": fitted.max_context,
        "host_bytes": option.layout.data * _offloading_bytes(plan.demand),
    }


def _offloading_bytes(demand: Demand) -> int:
    """Host memory of a replica for evicted blocks of the KV cache."""
    if demand.config is not None:
        return demand.config.cache.offloading_bytes
    return int(float(demand.options.get("kv_offloading_size") or 0) * GIB)


def _bandwidth_json(plan: Plan, option: Option) -> list[dict[str, Any]]:
    return [asdict(traffic) for traffic in axis_traffic(plan, option)] if option.speed is not None else []


def plan_json(plan: Plan, api: ApiPrice | None = None, others: OtherPrices | None = None) -> dict[str, Any]:
    """The plan as JSON data. Times are milliseconds, prices US dollars, sizes bytes."""
    others = others or OtherPrices()
    costs, commands = recommended_costs(plan, others), plan_commands(plan)
    tokens = None if api is None else api_break_even(plan, api, others)
    return {
        "api_break_even_tokens_a_day": None if tokens is None or math.isinf(tokens) else tokens,
        "model": plan.model.name,
        "gpus": plan.cluster.name,
        "missing": (missing_weights(plan, plan.options[0].fit) or None) if plan.options else None,
        "computed_by_torch": dict(plan.model.by_torch),
        "vllm_only": plan.model.engine_refusal or plan.instead or None,
        "layouts": [
            option_json(option) | ({"turns_yes": turns_yes(plan, option)} if option.speed is None else {})
            for option in plan.options
        ],
        "recommended": plan.recommended,
        "memory": None if plan.best is None else plan_memory(plan, plan.best),
        "bandwidth": [] if plan.best is None else _bandwidth_json(plan, plan.best),
        "costs": None if costs is None else asdict(costs),
        "path": [asdict(step) for step in explain_path(plan)],
        "commands": {engine: command and command.line for engine, command in commands.items()},
        "command_notes": {engine: (command and command.note) or None for engine, command in commands.items()},
    }


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
        fitted = dataclasses.replace(option.fit, layout=layout, stages=stages, deployment=None)
        try:
            work = layout_work(plan.model, layout, fitted)
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
    for axis in STARTED_AXES:
        if axis != "pipeline" or ranks <= len(plan.model.spec.layers):
            yield COORDINATES[axis], option.layout.along(**{axis: ranks})
    if any(layer.feed_forward.routing for layer in plan.model.spec.layers):
        yield "ep", dataclasses.replace(option.layout.along(data=ranks), whole_experts=True)


def link_rates(plan: Plan) -> dict[str, float]:
    """Bytes per second of one direction of each link: that of a node, that of a host, and the network between nodes.

    Ranks on the cores of one host have its memory only.
    """
    cluster = plan.cluster
    links = [(cluster.link.kind, cluster.link.gbs)]
    if not cluster.is_shared:
        links += [("pcie", cluster.slowest.pcie_gbs), ("network", cluster.network_bytes_per_second / GB)]
    return {f"{kind} {gbs:g}": gbs * GB for kind, gbs in links}
