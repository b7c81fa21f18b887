"""Two layouts side by side, and where one overtakes the other."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from shardline.config.engine import CacheConfig
from shardline.config.topology import COORDINATES
from shardline.planner.hardware import GIB, GpuLink
from shardline.planner.layout import Layout
from shardline.planner.memory import bits_label
from shardline.planner.report import option_json
from shardline.planner.search import Option, Plan, evaluate
from shardline.planner.speed import Speed, layout_speed
from shardline.planner.timing import Interval

_SIZE = re.compile(r"([a-z]+)([1-9]\d*)")
_KV_TYPES = CacheConfig.__dataclass_fields__["kv_cache_dtype"].metadata["choices"]
_ROUNDS = 12
_LINKS = (1.0, 1024.0)
"""GB/s of one direction between which a change of order is sought."""
_FASTEST, _MOST = "TPOT", "tokens/s"


def parse_layout(text: str, plan: Plan) -> Layout:
    """The layout in "tp4", "tp2-pp2", "int4-tp2" or "tp8-ep-kv:fp8". What it leaves out is 1, or the checkpoint's own.

    Raises:
        ValueError: a part of the text is unknown.
    """
    engine = plan.options[0].layout.engine if plan.options else "vllm"
    axes = {name: axis for axis, name in COORDINATES.items()}
    labels = {bits_label(plan.model), *(option.layout.weights for option in plan.options)}
    values: dict[str, object] = {"engine": engine, "weights": bits_label(plan.model)}
    if engine == "shardline" and plan.fixed.numerics is not None:
        values["numerics"] = plan.fixed.numerics
    for part in re.split(r"[-+, ]+", text.strip()):
        size = _SIZE.fullmatch(part)
        if size is not None and size[1] in axes:
            values[axes[size[1]]] = int(size[2])
        elif part == "ep":
            values["whole_experts"] = True
        elif part.startswith("kv:") and part[3:] in _KV_TYPES:
            values["kv"] = part[3:]
        elif part in labels:
            values["weights"] = part
        else:
            raise ValueError(
                f"--compare {text!r}: {part!r} is no part of a layout; write for example tp4, tp2-pp2 or int4-dp2; "
                f"known weights are {', '.join(sorted(labels))}"
            )
    return Layout(**values)  # type: ignore[arg-type]


def compare_layouts(plan: Plan, names: Sequence[str]) -> list[Option]:
    """The layouts with these names, with their figures.

    Raises:
        ValueError: a name is no layout, or needs more GPUs than there are.
    """
    named = [parse_layout(name, plan) for name in names]
    for name, layout in zip(names, named, strict=True):
        if layout.num_gpus > plan.cluster.num_gpus:
            raise ValueError(
                f"--compare {name!r}: it needs {layout.num_gpus} GPUs, and {plan.cluster.name} has "
                f"{plan.cluster.num_gpus}"
            )
    return [evaluate(plan.model, layout, plan.cluster, plan.demand, plan.timing) for layout in named]


def format_comparison(plan: Plan, options: Sequence[Option]) -> str:
    """Both layouts line by line, and where they swap."""
    lines = [f"{'':26}" + "".join(f"{option.layout!s:>24}" for option in options)]
    for title, value in _LINES:
        lines.append(f"{title:26}" + "".join(f"{value(option):>24}" for option in options))
    lines += [f"no: {option.layout}: {option.fit.why_not}" for option in options if not option.fits]
    return "\n".join([*lines, *comparison_swaps(plan, options)])


def comparison_json(plan: Plan, options: Sequence[Option]) -> dict[str, Any]:
    """Both layouts with their figures, and where they swap, as JSON data."""
    return {"layouts": [option_json(option) for option in options], "swaps": comparison_swaps(plan, options)}


def comparison_swaps(plan: Plan, options: Sequence[Option]) -> list[str]:
    """Where two layouts swap; nothing if one has no speed."""
    return [] if any(option.speed is None for option in options) else swaps(plan, options[0], options[1])


def swaps(plan: Plan, first: Option, second: Option) -> list[str]:
    """Where the faster of two layouts that fit becomes the slower one: over the load, and over the link's rate."""
    lines = []
    most = min(_most_running(plan, option) for option in (first, second))

    def at_load(option: Option, running: float) -> Speed:
        demand = dataclasses.replace(plan.demand, rate=None, running=max(1, round(running)))
        return _speed(plan, option, demand=demand)

    def at_link(option: Option, rate: float) -> Speed:
        link = GpuLink("any", rate, rate, len(plan.cluster.gpus))
        return _speed(plan, option, cluster=dataclasses.replace(plan.cluster, link=link))

    for quantity in (_FASTEST, _MOST):
        lines.append(_swap(quantity, "requests at once", (1.0, most), at_load, first, second))
    for quantity in (_FASTEST, _MOST):
        lines.append(_swap(quantity, "GB/s of the link", _LINKS, at_link, first, second))
    return lines


def _most_running(plan: Plan, option: Option) -> float:
    demand = dataclasses.replace(plan.demand, rate=None, running=None)
    return _speed(plan, option, demand=demand).running


def _speed(plan: Plan, option: Option, **changes: object) -> Speed:
    arguments = {"cluster": plan.cluster, "demand": plan.demand} | changes
    timing = plan.timing[option.layout.engine]
    return layout_speed(plan.model, option.layout, fitted=option.fit, timing=timing, **arguments)  # type: ignore[arg-type]


def _swap(
    quantity: str,
    scale: str,
    ends: tuple[float, float],
    at: Callable[[Option, float], Speed],
    first: Option,
    second: Option,
) -> str:
    """The order of two layouts from the one to the other end of a scale, in words."""

    def best(value: float) -> str:
        first_speed, second_speed = at(first, value), at(second, value)
        by_time, by_rate = (
            second_speed.tpot.p50 - first_speed.tpot.p50,
            first_speed.output_tok_s.p50 - second_speed.output_tok_s.p50,
        )
        lead = by_time if quantity == _FASTEST else by_rate
        return f"{(first if lead > 0 else second).layout} is better" if lead else "both are equal"

    low, high = ends
    at_low, at_high = best(low), best(high)
    if at_low == at_high:
        return f"{quantity}: {at_low} from {low:,.0f} to {high:,.0f} {scale}"
    for _ in range(_ROUNDS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if best(middle) == at_low else (low, middle)
    return f"{quantity}: {at_low} up to {low:,.0f} {scale}, {at_high.removesuffix(' is better')} above"


def _interval(pick: Callable[[Speed], Interval], factor: float, digits: int) -> Callable[[Option], str]:
    def text(option: Option) -> str:
        if option.speed is None:
            return "-"
        low, middle, high = (f"{bound * factor:.{digits}f}" for bound in pick(option.speed))
        return f"{middle} ({low}-{high})"

    return text


def _of_speed(write: Callable[[Speed], str]) -> Callable[[Option], str]:
    return lambda option: "-" if option.speed is None else write(option.speed)


_LINES: tuple[tuple[str, Callable[[Option], str]], ...] = (
    ("GPUs", lambda option: str(option.layout.num_gpus)),
    ("weights a GPU, GiB", lambda option: f"{option.fit.weight_bytes / GIB:.1f}"),
    ("step and libraries, GiB", lambda option: f"{option.fit.other_bytes / GIB:.1f}"),
    ("KV cache a GPU, GiB", lambda option: f"{max(0, option.fit.kv_bytes) / GIB:.1f}"),
    ("verdict", lambda option: option.fit.verdict),
    ("longest request, tokens", lambda option: f"{option.fit.max_context:,}"),
    ("requests of full length", lambda option: f"{option.fit.requests}"),
    ("running at once", _of_speed(lambda speed: f"{speed.running:.0f}")),
    ("TTFT, s", _interval(lambda speed: speed.ttft, 1, 2)),
    ("TPOT, ms", _interval(lambda speed: speed.tpot, 1e3, 1)),
    ("output tokens/s", _interval(lambda speed: speed.output_tok_s, 1, 0)),
    (
        "$ a million output tokens",
        lambda option: "-" if option.cost_per_million is None else f"{option.cost_per_million:.2f}",
    ),
    ("received in a decode step", _of_speed(lambda speed: f"{speed.exchange_bytes / 1e6:.2f} MB")),
    ("exchanges in a step", _of_speed(lambda speed: str(speed.exchange_messages))),
    ("links' share of a step", _of_speed(lambda speed: f"{speed.link_share:.0%}")),
    ("bound by", _of_speed(lambda speed: speed.bound_by)),
)
