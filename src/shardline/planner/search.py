"""Every layout of a model on a cluster: what fits, how fast it is, what it costs, and which one to take."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.config.topology import COORDINATES
from shardline.deployment.generations import generation_of
from shardline.models.sharding import check_tensor_parallel
from shardline.planner import vllm
from shardline.planner.cluster import Cluster, can_link, parse_cluster
from shardline.planner.hardware import GIB, Gpu, known_gpus
from shardline.planner.layout import HOST_AXES, STARTED_AXES, Demand, Layout
from shardline.planner.memory import Fit, bits_label, fit, packed_bytes, stored_weights
from shardline.planner.models.parts.compressed import is_compressed
from shardline.planner.planned_model import PlannedModel
from shardline.planner.speed import Speed, layout_speed
from shardline.planner.timing import Timing, shipped_timing

_SECONDS_PER_HOUR = 3600
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that are tried if none is given."""
_NODE = 8
"""GPUs of a node, if no number is given."""
_EVERY_NUMBER = 8
"""GPUs up to which every smaller number of them is looked at."""
_SAME_PRICE = 1.03
"""Prices up to so many times the lowest count as the same."""


@dataclass(frozen=True)
class Fixed:
    """Choices that the user has made; None: to be searched."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    whole_experts: bool | None = None
    weights: str | None = None
    kv: str | None = None
    context: int | None = None
    numerics: str | None = None

    @property
    def num_ranks(self) -> int:
        """The product of the sizes that are fixed."""
        return math.prod(getattr(self, axis) or 1 for axis in COORDINATES)


def fixed_choices(options: Mapping[str, Any], model: PlannedModel) -> Fixed:
    """What the given options of the engine fix. A stated method of the checkpoint itself is its own format."""
    quantization = options.get("quantization")
    is_stated = model.rules.method and quantization in (model.rules.method, model.rules.method.replace("-", "_"))
    if is_stated or (quantization == "none" and not model.rules.rules):
        quantization = bits_label(model)
    return Fixed(
        **{axis: options.get(f"{axis}_parallel_size") for axis in COORDINATES},
        whole_experts=options.get("enable_expert_parallel"),
        weights="bf16" if quantization == "none" else quantization,
        kv=options.get("kv_cache_dtype"),
        numerics=options.get("numerics"),
    )


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
        return self.fit.layout

    @property
    def fits(self) -> bool:
        """Whether an engine starts it. Context parallelism has a speed on GPUs, but no engine starts it there yet."""
        return self.fit.fits

    @property
    def is_good(self) -> bool:
        """Whether it starts, has room for the wanted requests, and meets the demand."""
        return self.fits and self.fit.verdict != "tight" and not self.misses


@dataclass(frozen=True)
class Plan:
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

    @property
    def best(self) -> Option | None:
        return None if self.recommended is None else self.options[self.recommended]


def search(
    model: PlannedModel,
    cluster: Cluster,
    demand: Demand,
    goal: str,
    engine: str | None = None,
    fixed: Fixed | None = None,
    timing: Mapping[str, Timing] | None = None,
) -> Plan:
    """Evaluate every layout. Without an `engine`, this one is taken if it can load the model, else vLLM."""
    chosen = engine or engine_for(model, cluster)
    if goal == "latency" and demand.rate is None and demand.running is None:
        # The latency of full memory would reward layouts with little memory.
        demand = dataclasses.replace(demand, running=demand.concurrency)
    fixed = fixed or Fixed()
    options = [evaluate(model, layout, cluster, demand, timing) for layout in layouts(model, cluster, chosen, fixed)]
    names = _unable(model, cluster) if engine is None and not model.engine_refusal else ""
    instead = f"vLLM instead: {names} does not compute in {model.spec.dtype}; it takes float16." if names else ""
    if engine is None and chosen == "shardline" and model.rules.rules and not any(option.fits for option in options):
        # vLLM keeps weights packed that this engine expands on GPUs.
        others = [evaluate(model, layout, cluster, demand, timing) for layout in layouts(model, cluster, "vllm", fixed)]
        if any(option.fits for option in others):
            instead, options = _instead(model, options), others
    own = bits_label(model)
    prices = [option.cost_per_million for option in options if option.cost_per_million and option.is_good]
    near = _SAME_PRICE * min(prices, default=0.0)
    options.sort(key=lambda option: _rank(option, goal, own, near))
    good = options and options[0].fits and not options[0].misses
    return Plan(
        model, cluster, demand, goal, tuple(options), 0 if good else None, timing or shipped_timing(), fixed, instead
    )


def _instead(model: PlannedModel, refused: Sequence[Option]) -> str:
    """Why vLLM is planned for, if none of this engine's layouts fits."""
    smallest = min((option.fit for option in refused), key=lambda fitted: fitted.layout.num_gpus)
    packed = packed_bytes(model, smallest)
    missing = f" Missing: {missing_kernels(smallest, packed)}." if packed else ""
    return f"vLLM instead: no layout of Shardline fits; --engine shardline shows its figures.{missing}"


def missing_kernels(fitted: Fit, packed: int) -> str:
    """What this engine lacks to keep weights packed, which would then have `packed` bytes on a GPU."""
    return (
        f"GPU kernels of Shardline that keep these {fitted.layout.weights} weights packed; it expands them to bf16, "
        f"{fitted.weight_bytes / GIB:,.0f} GiB a GPU with {fitted.layout}, not {packed / GIB:,.0f}"
    )


def plan_on(
    gpus: str,
    model: PlannedModel,
    demand: Demand,
    goal: str = "cost",
    engine: str | None = None,
    fixed: Fixed | None = None,
    *,
    link: str | None = None,
    inter_node: str | None = None,
    known: Mapping[str, Gpu] | None = None,
) -> Plan:
    """The plan for GPUs as a user names them: "4xH100-80GB"; "H100" for the fewest that do; "any" for the cheapest.

    Raises:
        ValueError: the GPUs are unknown, or no layout can have the `fixed` sizes.
    """
    known, fixed = known or known_gpus(), fixed or Fixed()

    def on(text: str) -> Plan:
        return search(model, parse_cluster(text, known, link, inter_node), demand, goal, engine, fixed)

    if gpus == "any":
        names = [name for name, gpu in known.items() if gpu.price is not None and can_link(gpu, link)]
        if not names:
            raise ValueError(f"--link {link}: no GPU with a known price has it; leave it out")
        plan = _cheapest([_fewest(on, name) for name in names])
    elif re.match(r"\d+x|.*\+", gpus, re.IGNORECASE):
        plan = on(gpus)
    else:
        plan = _fewest(on, gpus)
    check_sizes(model, plan.cluster, engine or engine_for(model, plan.cluster), fixed)
    if model.spec.dtype == "bfloat16" and (unable := _unable(model, plan.cluster)):
        _check_detour(unable, engine, demand)
    check_refusals(plan)
    return plan


def _check_detour(names: str, engine: str | None, demand: Demand) -> None:
    """Refuse what a plan for GPUs that do not compute in bfloat16 cannot have."""
    if engine == "shardline":
        raise ValueError(
            f"--engine shardline: {names} does not compute in bfloat16; leave it out to plan vLLM, which takes float16 "
            "there (`shardline serve --kernels torch` works, but a plan has no figures for it)"
        )
    if demand.options.get("dtype", "auto") != "auto":
        raise ValueError(f"--dtype bfloat16: {names} does not compute in it; use --dtype float16, or leave it out")


def _cheapest(plans: Sequence[Plan]) -> Plan:
    """The plan whose recommendation costs least; the first of all if none recommends a layout."""
    costs = [plan.best.cost_per_million if plan.best else None for plan in plans]
    return plans[min(range(len(plans)), key=lambda index: costs[index] or math.inf)]


def _fewest(on: Callable[[str], Plan], name: str) -> Plan:
    """The plan for the smallest number of GPUs with a layout to recommend; else for the largest."""
    for count in _COUNTS:
        plan = on(f"{count}x{name}" if count <= _NODE else f"{count // _NODE}x{_NODE}x{name}")
        if plan.best is not None and plan.best.fit.verdict != "tight":
            good = [option for option in plan.options if option.is_good]
            fewest = min(option.layout.num_gpus for option in good)
            return on(f"{fewest}x{name}") if fewest < min(count, _NODE + 1) else plan
    return plan


def engine_for(model: PlannedModel, cluster: Cluster) -> str:
    """The engine to plan for: this one if it can run the model on these GPUs, else vLLM."""
    is_ours = not model.engine_refusal and all(gpu.vendor == "NVIDIA" for gpu in cluster.gpus)
    return "shardline" if is_ours and not _unable(model, cluster) else "vllm"


def _unable(model: PlannedModel, cluster: Cluster) -> str:
    """Which GPUs do not compute in the model's dtype without a detour. vLLM takes float16 for bfloat16 there."""
    devices = [device for host in cluster.machine(0).hosts for device in host.devices]
    known = {device.name: generation_of(device) for device in devices}
    return ", ".join(name for name, own in known.items() if own and model.spec.dtype not in own.native)


def check_sizes(model: PlannedModel, cluster: Cluster, engine: str, fixed: Fixed) -> None:
    """Refuse parallel sizes that no layout of the engine can have, whatever else is searched.

    Raises:
        ValueError: the heads forbid the tensor-parallel size, there are too few GPUs, or a format is unknown.
    """
    tensor, whole = fixed.tensor or 1, fixed.whole_experts is not False
    if fixed.weights:
        stored_weights(model, fixed.weights)
    if engine == "shardline":
        check_tensor_parallel(model.spec, tensor)
    else:
        has_experts = any(layer.feed_forward.routing for layer in model.spec.layers)
        smallest = Layout(
            engine, tensor, data=fixed.data or 2, whole_experts=whole and has_experts, kv=fixed.kv or "auto"
        )
        why = vllm.refusal(model.spec, model.stored(), smallest)
        if why:
            raise ValueError(why)
    if fixed.num_ranks > cluster.num_gpus:
        raise ValueError(f"the parallel sizes need {fixed.num_ranks} GPUs, and {cluster.name} has {cluster.num_gpus}")


def check_refusals(plan: Plan) -> None:
    """See that something else than one mistake of the user keeps all layouts from starting.

    Raises:
        ValueError: there is no layout, or all are refused for one reason that is not the memory.
    """
    fits = [option.fit for option in plan.options]
    if not fits:
        raise ValueError(f"no layout of {plan.cluster.name} has the given sizes; leave one of them out")
    if not any(fitted.other_bytes for fitted in fits) and len({fitted.why_not for fitted in fits}) == 1:
        raise ValueError(fits[0].why_not)


def evaluate(
    model: PlannedModel, layout: Layout, cluster: Cluster, demand: Demand, timing: Mapping[str, Timing] | None = None
) -> Option:
    """All figures of one layout. `timing` has the constants of each engine; None: the shipped ones."""
    fitted = fit(model, layout, cluster, demand)
    cost = cluster.part(layout.num_gpus).price_per_hour if layout.num_gpus <= cluster.num_gpus else None
    refusal = fitted.why_not
    is_priced = layout.context > 1 and not cluster.is_shared
    if is_priced:
        fitted = _spread_context(model, layout, cluster, demand, refusal)
    if fitted.verdict == "no" and not (is_priced and fitted.stages):
        return Option(fitted, None, cost, None)
    constants = (timing or shipped_timing())[layout.engine]
    speed = layout_speed(model, layout, cluster, demand, fitted, constants)
    dollars = None
    if cost is not None:
        dollars = per_million(cost[1], speed.output_tok_s.p50)
    if is_priced:
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


def per_million(price_per_hour: float, tokens_per_second: float) -> float:
    return price_per_hour / (tokens_per_second * _SECONDS_PER_HOUR) * 1e6


def layouts(model: PlannedModel, cluster: Cluster, engine: str, fixed: Fixed) -> Iterator[Layout]:
    """Every layout that the fixed choices allow, up to all GPUs of the cluster."""
    has_experts = any(layer.feed_forward.routing for layer in model.spec.layers)
    experts = (False, True) if has_experts else (False,)
    labels = [fixed.weights] if fixed.weights else _labels(model, cluster, engine)
    numerics = fixed.numerics if engine == "shardline" and fixed.numerics else "exact"
    caches = [fixed.kv] if fixed.kv else _kv_labels(model, cluster, engine)
    plain = Layout(engine, numerics=numerics)
    axes = HOST_AXES if cluster.is_shared or fixed.context else STARTED_AXES
    for num_gpus in _counts(cluster, fixed):
        for sizes in _divide(num_gpus, axes, fixed):
            if sizes["pipeline"] > len(model.spec.layers):
                continue
            for whole in experts if fixed.whole_experts is None else (fixed.whole_experts,):
                if whole and sizes["tensor"] * sizes["data"] * sizes.get("context", 1) == 1:
                    continue
                for label in labels:
                    for kv in caches:
                        yield dataclasses.replace(plain.along(**sizes), whole_experts=whole, weights=label, kv=kv)


def _counts(cluster: Cluster, fixed: Fixed) -> list[int]:
    """Numbers of GPUs to look at: all, half of them and so on; up to 8 every number.

    Fixed sizes that divide none of them add the fewest and the most GPUs on which they work.
    """
    total = cluster.num_gpus
    if total <= _EVERY_NUMBER or cluster.host is not None:
        return list(range(1, total + 1))
    counts = {total >> shift for shift in range(total.bit_length())}
    unit = fixed.num_ranks
    if unit <= total and all(count % unit for count in counts):
        counts |= {unit, total // unit * unit}
    return sorted(counts)


def _divide(num_gpus: int, axes: Sequence[str], fixed: Fixed) -> Iterator[dict[str, int]]:
    """Every way to divide the GPUs among axes so that the product of all sizes is their number."""
    axis, *others = axes
    for size in range(1, num_gpus + 1) if others else (num_gpus,):
        if num_gpus % size == 0 and getattr(fixed, axis) in (None, size):
            for rest in _divide(num_gpus // size, others, fixed) if others else ({},):
                yield {axis: size, **rest}


def _labels(model: PlannedModel, cluster: Cluster, engine: str) -> list[str]:
    """The weights to look at: the checkpoint's own, and quantized ones if it is not quantized."""
    own = bits_label(model)
    return [own] if model.rules.rules else [own, *_one_byte(cluster, engine), "int" + "4"]


def _kv_labels(model: PlannedModel, cluster: Cluster, engine: str) -> list[str]:
    if is_compressed(model.spec):
        return ["auto"]  # there is only one: see `vllm.kv_flag`
    return ["auto", *_one_byte(cluster, engine)]


def _one_byte(cluster: Cluster, engine: str) -> list[str]:
    """The first format of one byte in which all of the GPUs compute: floats, and for this engine also integers."""
    labels = [label for label in cluster.slowest.tflops if label.endswith("8")]
    common = [label for label in labels if all(label in gpu.tflops for gpu in cluster.gpus)]
    return [label for label in common if label.startswith("f") or engine == "shardline"][:1]


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
