"""Every layout of a model on a cluster: what fits, how fast it is, what it costs, and which one to take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from shardline.checkpoints.planning import PlannedModel
from shardline.models.communication import Exchange, context_traffic
from shardline.models.partition import Span
from shardline.models.step_work import StepWork, attention_work, step_work
from shardline.planner import vllm
from shardline.planner.candidates import Fixed, layouts
from shardline.planner.cluster import Cluster
from shardline.planner.cost import per_million
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import Fit, bits_label, fit, held_weights, kv_dtype
from shardline.planner.timing import (
    Interval,
    Latency,
    Load,
    LoopSteps,
    Timing,
    by_little,
    loop_latency,
    loop_steps,
    shipped_timing,
)

_SAME_PRICE = 1.03
"""Prices up to so many times the lowest count as the same."""
_DENSE = (
    "vLLM instead: Shardline makes some of these quantized weights dense on GPUs, and then no layout fits; "
    "--engine shardline shows its figures"
)
_DEFAULT_RUNNING = {"shardline": 128, "vllm": 256}
"""max_num_seqs of the engines; vLLM's is larger on large GPUs, where memory limits it first."""
_DEFAULT_TOKENS = {"shardline": 2048, "vllm": 8192}
"""max_num_batched_tokens of the engines on large GPUs."""


@dataclass(frozen=True)
class Speed:
    """What requests see of a layout under the demanded load; times in seconds."""

    running: float
    """Requests running at once, over all replicas."""
    ttft: Interval
    tpot: Interval
    output_tok_s: Interval
    bound_by: str
    link_share: float
    """Share of a decode step that exchanges take."""
    exchange_bytes: float
    """What a rank receives in a decode step."""
    exchange_messages: int
    """Exchanges of a decode step, one after the other."""
    link_bytes_per_second: float
    """Rate at which the exchanged bytes alone would take as long as the rest of the step."""
    is_sustained: bool
    """Whether the layout keeps up with the demanded rate."""


@dataclass(frozen=True)
class Option:
    """One layout with all figures. Prices are US dollars, (spot, on demand)."""

    fit: Fit
    speed: Speed | None
    """None: it does not fit."""
    price_per_hour: tuple[float, float] | None
    cost_per_million: float | None
    """US dollars for a million output tokens under the demanded load, on demand."""
    misses: str = ""
    """Which demand it misses by the median prediction; empty: none."""
    may_miss: str = ""
    """Which demand it meets by the median prediction, but not in the whole interval; empty: none."""

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.fit.layout

    @property
    def fits(self) -> bool:
        """Whether an engine starts it. Context parallelism has a speed, but no engine starts it yet."""
        return self.fit.fits


@dataclass(frozen=True)
class Search:
    """The options of a model on a cluster, the best first."""

    model: PlannedModel
    cluster: Cluster
    demand: Demand
    goal: str
    options: tuple[Option, ...]
    recommended: int | None
    """Index into `options`; None: nothing fits or meets the demand."""
    timing: Mapping[str, Timing]
    """For each engine, the constants of its steps."""
    fixed: Fixed
    """What the user has chosen."""
    instead: str = ""
    """Why vLLM is planned for although this engine runs the model; empty: it is not, or the user asked for it."""


def layout_work(model: PlannedModel, layout: Layout, fitted: Fit) -> StepWork:
    """The work of the rank that has the most."""
    same = dataclasses.replace(layout, kv="auto", data=layout.data if layout.whole_experts else 1, context=1)
    work, stage = _plain_work(model, same, tuple(fitted.stages))
    if layout.kv != "auto":
        attention = attention_work(
            model.spec, stage, layout.tensor, kv_dtype(layout, model.spec), expands=layout.engine != "shardline"
        )
        work = dataclasses.replace(work, attention=attention)
    if layout.context == 1:
        return work
    merged = context_traffic(model.spec, stage, layout.context, 1)
    return dataclasses.replace(
        work,
        attention=tuple(one.shared_by(layout.context) for one in work.attention),
        exchanges=(*work.exchanges, (merged, layout.context)),
    )


@functools.lru_cache(maxsize=512)
def _plain_work(model: PlannedModel, layout: Layout, stages: tuple[Span, ...]) -> tuple[StepWork, Span]:
    """(work, stage) of the rank that has the most, with a KV cache in 16 bits."""
    stored = held_weights(model, layout)
    grid = vllm.grid_of(layout)
    places = [grid.place(rank) for rank in range(0, grid.replica_size, layout.tensor)]
    place = max(places, key=lambda one: stages[one.pp_rank].size)
    ours = layout.engine == "shardline"
    work = step_work(
        model.spec,
        place,
        stages,
        stored,
        kv_dtype(layout, model.spec),
        cast(Exchange, layout.numerics) if ours else "vllm",
        whole_experts=layout.whole_experts,
        whole=() if ours else vllm.WHOLE_PARTS,
    )
    return work, stages[place.pp_rank]


def price(cluster: Cluster, layout: Layout) -> tuple[float, float] | None:
    """(spot, on demand) US dollars an hour for the GPUs of a layout."""
    return cluster.part(layout.num_gpus).price_per_hour


def evaluate(
    model: PlannedModel, layout: Layout, cluster: Cluster, demand: Demand, timing: Mapping[str, Timing] | None = None
) -> Option:
    """All figures of one layout. `timing` has the constants of each engine; None: the shipped ones."""
    fitted = fit(model, layout, cluster, demand)
    cost = price(cluster, layout) if layout.num_gpus <= cluster.num_gpus else None
    refusal = fitted.why_not
    if layout.context > 1:
        fitted = _spread_context(model, layout, cluster, demand, refusal)
    if fitted.verdict == "no" and not (layout.context > 1 and fitted.stages):
        return Option(fitted, None, cost, None)
    constants = (timing or shipped_timing())[layout.engine]
    speed = layout_speed(model, layout, cluster, demand, fitted, constants)
    dollars = None
    if cost is not None:
        dollars = per_million(cost[1], speed.output_tok_s.p50)
    if layout.context > 1:
        return Option(fitted, speed, cost, dollars, refusal)
    return Option(fitted, speed, cost, dollars, *_misses(speed, demand))


def _spread_context(model: PlannedModel, layout: Layout, cluster: Cluster, demand: Demand, refusal: str) -> Fit:
    """The memory of a layout whose ranks share each request's KV cache; no engine starts it, as `refusal` says."""
    alone, shares = dataclasses.replace(layout, context=1), layout.context
    fitted = fit(model, alone, cluster, dataclasses.replace(demand, max_model_len=-(-demand.max_model_len // shares)))
    most = model.spec.max_position_embeddings
    return dataclasses.replace(
        fitted,
        layout=layout,
        verdict="no",
        kv_tokens=fitted.kv_tokens * shares,
        max_context=min(fitted.max_context * shares, most),
        max_model_len=demand.max_model_len,
        why_not=refusal,
        stages=fitted.stages if fitted.verdict != "no" else (),
    )


def step_limits(layout: Layout, demand: Demand) -> tuple[int, int]:
    """(most requests running on a replica, most tokens in a step): the demanded ones, else the engine's defaults."""
    return (
        demand.max_num_seqs or _DEFAULT_RUNNING[layout.engine],
        demand.max_num_batched_tokens or _DEFAULT_TOKENS[layout.engine],
    )


def layout_speed(
    model: PlannedModel, layout: Layout, cluster: Cluster, demand: Demand, fitted: Fit, timing: Timing
) -> Speed:
    """What requests see of a layout that fits."""
    used = cluster.part(layout.num_gpus)
    work = layout_work(model, layout, fitted)
    per_request = demand.input_len + demand.output_len
    by_memory = max(1.0, fitted.concurrency * demand.max_model_len / per_request / layout.data)
    max_num_seqs, chunk = step_limits(layout, demand)
    most = min(by_memory, max_num_seqs)

    is_full = demand.rate is None and demand.running is None

    arrivals = demand.rate / layout.data if demand.rate is not None and demand.running is None else None

    def at(running: float) -> tuple[LoopSteps, Latency]:
        load = Load(
            running,
            demand.input_len,
            demand.output_len,
            chunk,
            lockstep=layout.lockstep,
            saturated=is_full,
            arrivals=arrivals,
        )
        steps = loop_steps(work, used, load, layout.pipeline)
        return steps, loop_latency(steps, timing.constants)

    running, sustained = most, True
    if demand.running is not None:
        running = min(most, max(1.0, demand.running / layout.data))
    elif demand.rate is not None:
        running, sustained = by_little(demand.rate / layout.data, most, lambda value: at(value)[1], demand.output_len)
    steps, latency = at(running)
    speed = layout.data * latency.output_tokens_per_second
    if demand.rate is not None and sustained:
        speed = min(speed, demand.rate * demand.output_len)
    decode = steps.decode
    seconds = decode.seconds(timing.constants)
    share = decode.link_seconds(timing.constants) / seconds
    rest = seconds * (1 - share)
    exchanges = (*(traffic for traffic, _ in work.exchanges), work.hand_off)
    moved = sum(traffic.num_bytes for traffic in exchanges) * running / layout.pipeline
    return Speed(
        running * layout.data,
        timing.interval("ttft", latency.ttft),
        timing.interval("tpot", latency.tpot),
        timing.interval("output_tok_s", speed),
        decode.bound_by(timing.constants),
        share,
        moved,
        sum(traffic.num_messages for traffic in exchanges),
        moved / rest,
        sustained,
    )


def _misses(speed: Speed, demand: Demand) -> tuple[str, str]:
    """(demands that the median prediction misses, further ones that the upper end of the interval misses)."""
    missed: list[str] = []
    at_risk: list[str] = []
    if not speed.is_sustained:
        missed.append(f"{demand.rate:g} requests/s")
    limits = (
        (f"TTFT {demand.ttft or 0:g} s", demand.ttft, speed.ttft),
        (f"TPOT {1e3 * (demand.tpot or 0):g} ms", demand.tpot, speed.tpot),
    )
    for name, limit, predicted in limits:
        if limit is not None and predicted.p90 > limit:
            (missed if predicted.p50 > limit else at_risk).append(name)
    return ", ".join(missed), ", ".join(at_risk)


def search(
    model: PlannedModel,
    cluster: Cluster,
    demand: Demand,
    goal: str,
    engine: str | None = None,
    fixed: Fixed | None = None,
    timing: Mapping[str, Timing] | None = None,
) -> Search:
    """Evaluate every layout. Without an `engine`, this one is taken if it can load the model, else vLLM."""
    chosen = engine or engine_for(model, cluster)
    if goal == "latency" and demand.rate is None and demand.running is None:
        # The latency of full memory would reward layouts with little memory.
        demand = dataclasses.replace(demand, running=demand.concurrency)
    fixed = fixed or Fixed()
    options = [evaluate(model, one, cluster, demand, timing) for one in layouts(model, cluster, chosen, fixed)]
    instead = ""
    if engine is None and chosen == "shardline" and model.rules.rules and not any(one.fits for one in options):
        # vLLM keeps weights packed that this engine makes dense on GPUs.
        others = [evaluate(model, one, cluster, demand, timing) for one in layouts(model, cluster, "vllm", fixed)]
        if any(one.fits for one in others):
            options, instead = others, _DENSE
    own = bits_label(model)
    prices = [
        one.cost_per_million
        for one in options
        if one.fits and one.cost_per_million and one.fit.verdict != "tight" and not one.misses
    ]
    near = _SAME_PRICE * min(prices, default=0.0)
    options.sort(key=lambda option: _rank(option, goal, own, near))
    good = options and options[0].fits and not options[0].misses
    return Search(
        model, cluster, demand, goal, tuple(options), 0 if good else None, timing or shipped_timing(), fixed, instead
    )


def check_refusals(found: Search) -> None:
    """See that something else than one mistake of the user keeps all layouts from starting.

    Raises:
        ValueError: there is no layout, or all are refused for one reason that is not the memory.
    """
    fits = [one.fit for one in found.options if one.layout.context == 1]
    if not fits:
        raise ValueError(f"no layout of {found.cluster.name} has the given sizes; leave one of them out")
    if not any(one.other_bytes for one in fits) and len({one.why_not for one in fits}) == 1:
        raise ValueError(fits[0].why_not)


def engine_for(model: PlannedModel, cluster: Cluster) -> str:
    """The engine to plan for: this one if it can run the model on these GPUs, else vLLM."""
    is_ours = not model.engine_refusal and all(gpu.vendor == "NVIDIA" for gpu in cluster.gpus)
    return "shardline" if is_ours else "vllm"


def _rank(option: Option, goal: str, own: str, near: float) -> tuple[float, ...]:
    """Sort key: layouts that fit and meet the demand first, then by the goal.

    For latency and throughput, the checkpoint's own format comes before the goal, since quantization changes answers.
    Who asks for the lowest cost gets it, and the path says what the checkpoint's own format would cost. Of layouts that
    cost at most `near`, one that changes no answers comes first: predictions are not more precise than that.
    """
    speed, layout = option.speed, option.layout
    if speed is None or not option.fits:
        is_unknown = 8.0 + (speed is None)
        return (is_unknown, float(layout.weights != own), -float(option.fit.max_context), float(layout.num_gpus))
    figures = {
        "cost": option.cost_per_million or layout.num_gpus / speed.output_tok_s.p50,
        "latency": speed.tpot.p50,
        "throughput": -speed.output_tok_s.p50,
    }
    # Replicas of one layout have one price and speed. Without the errors of their sums, the fewest of them come first.
    figures = {name: float(f"{value:.6g}") for name, value in figures.items()}
    tight = 0.0 if option.fit.verdict != "tight" else 1.0
    missed, risks = (float(len(text.split(", "))) if text else 0.0 for text in (option.misses, option.may_miss))
    changed = float((layout.weights != own) + (layout.kv != "auto"))
    is_near = option.cost_per_million is not None and option.cost_per_million <= near
    if goal == "cost":
        order = (0.0, changed, figures[goal]) if is_near else (1.0, figures[goal], changed)
    else:
        order = (changed, figures[goal], 0.0)
    return (missed, tight, risks, *order, figures["latency"], float(layout.num_gpus))


def changes_answers(option: Option, own: str) -> bool:
    """Whether the layout quantizes what the checkpoint, with weights of the label `own`, does not."""
    return option.layout.weights != own or option.layout.kv != "auto"


def frontier(options: tuple[Option, ...]) -> list[int]:
    """Indices of the options that no other with the same formats beats in latency, throughput and cost together."""
    kept: list[int] = []
    for index, option in enumerate(options):
        if not option.fits:
            continue
        mine = _figures(option)
        formats = (option.layout.weights, option.layout.kv)
        others = (
            _figures(one)
            for one in options
            if one.fits and one is not option and (one.layout.weights, one.layout.kv) == formats
        )
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others):
            kept.append(index)
    return kept


def _figures(option: Option) -> tuple[float, ...]:
    speed = option.speed
    assert speed is not None
    cost = option.cost_per_million or option.layout.num_gpus / speed.output_tok_s.p50
    return (float(bool(option.misses)), speed.tpot.p50, -speed.output_tok_s.p50, cost)
