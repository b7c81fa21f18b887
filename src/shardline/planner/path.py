"""The path to a plan in words: the questions that decide, with the figures that answered them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shardline.models.partition import Span
from shardline.models.sharding import check_tensor_parallel
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GB, GIB, GpuLink
from shardline.planner.layout import Layout
from shardline.planner.memory import Fit, bits_label, fit
from shardline.planner.search import Option, Plan, changes_answers, layouts
from shardline.planner.speed import layout_work
from shardline.planner.timing import step_load
from shardline.planner.vllm import refusal

_EFFICIENCY_SIZES = (1, 2, 4, 8)
_USUAL_NODE = 8
"""GPUs of a node, if only a part of one is named."""
_MOST_GPUS = 64
"""GPUs up to which the fewest are sought."""
_INTERCONNECTS = (("NVLink 450", 450 * GB), ("PCIe Gen5 64", 64 * GB), ("PCIe Gen4 32", 32 * GB))
_GOOD_EFFICIENCY = 0.7
"""Share of the ideal speed-up from which tensor parallelism is worth its GPUs for throughput too."""
_SHORTEST = 5e-6
"""Seconds from which an exchange is shown as a number."""


@dataclass(frozen=True)
class Question:
    """One step of the path."""

    question: str
    figures: str
    answer: str


def explain_path(plan: Plan) -> list[Question]:
    """The questions that lead to the recommended layout, or to something else than these GPUs."""
    best = plan.best
    questions = [_one_gpu(plan), _heads(plan), _experts(plan)]
    linked = [option for option in plan.options if option.fits and option.layout.tensor * option.layout.pipeline > 1]
    if best is not None and linked:
        # If one GPU is enough, these are the figures of what more of them would need.
        joined = best if best in linked else linked[0]
        questions += [_link(plan, joined), _efficiency(plan, joined)]
    if best is not None and changes_answers(best, bits_label(plan.model)):
        questions.append(_bits(plan, best))
    questions.append(_decision(plan, best))
    return questions


def _one_gpu(plan: Plan) -> Question:
    """How many of these GPUs hold the model, by the weights' format. What the user has fixed stays fixed."""
    own, gpus = bits_label(plan.model), "+".join(dict.fromkeys(gpu.name for gpu in plan.cluster.gpus))
    labels = list(dict.fromkeys([own, *(option.layout.weights for option in plan.options)]))
    parts, fewest = [], []
    for label in [plan.fixed.weights] if plan.fixed.weights else labels:
        fitted = fewest_gpus(plan, label, _MOST_GPUS)
        if fitted is None:
            parts.append(f"{label}: more than {_MOST_GPUS}")
            continue
        fewest.append(fitted)
        tight = f", {fitted.verdict}" if fitted.verdict == "tight" else ""
        size = f"{fitted.weight_bytes / GIB:.1f} GiB of weights each{tight}"
        parts.append(f"{label}: {fitted.layout.num_gpus} as {fitted.layout} ({size})")
    return Question(
        f"one GPU? one node? ({gpus}, {plan.demand.max_model_len:,} tokens)",
        "; ".join(parts),
        _fewest_answer(plan, fewest),
    )


def _fewest_answer(plan: Plan, fewest: list[Fit]) -> str:
    if not fewest:
        return f"more than {_MOST_GPUS} GPUs: rent larger ones, or use an API"
    least = min(fitted.layout.num_gpus for fitted in fewest)
    answer = "one GPU is enough" if least == 1 else f"{least} GPUs at least"
    if all(fitted.verdict == "tight" for fitted in fewest if fitted.layout.num_gpus == least):
        answer = f"{least} GPU{'s' * (least > 1)} for fewer than {plan.demand.concurrency} such requests at once"
    size = len(plan.cluster.gpus)
    answer += _why_more(plan, least)
    return answer + f", so it does not fit one node of {size}" * (least > size)


def _why_more(plan: Plan, least: int) -> str:
    """Why the recommended layout has more than the fewest GPUs that hold the model."""
    best = plan.best
    small = next((option for option in plan.options if option.fits and option.layout.num_gpus == least), None)
    if best is None or small is None or best.layout.num_gpus <= least:
        return ""
    assert best.speed is not None
    assert small.speed is not None
    if small.misses:
        why = f"misses {small.misses}"
    elif small.fit.verdict == "tight":
        why = f"has room for {small.fit.requests} requests"
    elif plan.goal == "latency":
        why = f"has a TPOT of {1e3 * small.speed.tpot.p50:.1f} ms, not {1e3 * best.speed.tpot.p50:.1f}"
    elif plan.goal == "throughput":
        why = f"makes {small.speed.output_tok_s.p50:,.0f} tok/s, not {best.speed.output_tok_s.p50:,.0f}"
    else:
        why = f"costs {_price(small)}, not {_price(best).partition(' a million')[0]}"
    return f"; {best.layout.num_gpus} are recommended, since {small.layout} {why}"


def fewest_gpus(plan: Plan, label: str, most: int = 64) -> Fit | None:
    """The layout on the fewest GPUs that holds weights of a label; None: more than `most` are needed.

    Up to the GPUs of the search, it is one of the search's own layouts. Beyond them, more of the smallest GPU are
    tried, in twice as many at a time and without replicas.
    """
    own = [option.fit for option in plan.options if option.fits and option.layout.weights == label]
    if own:
        return min(own, key=_fewest_first)
    engine = plan.options[0].layout.engine if plan.options else "vllm"
    fixed = dataclasses.replace(plan.fixed, weights=label, data=plan.fixed.data or 1)
    size = 1
    while size <= most:
        if size > plan.cluster.num_gpus:
            wide = _more_gpus(plan.cluster, size)
            tried = (layout for layout in layouts(plan.model, wide, engine, fixed) if layout.num_gpus == size)
            fits = [
                fitted for fitted in (fit(plan.model, layout, wide, plan.demand) for layout in tried) if fitted.fits
            ]
            if fits:
                return min(fits, key=_fewest_first)
        size *= 2
    return None


def _more_gpus(cluster: Cluster, num_gpus: int) -> Cluster:
    """So many of the cluster's smallest GPU, in nodes as large as its own if there are several, else of 8."""
    size = len(cluster.gpus) if cluster.num_nodes > 1 else max(_USUAL_NODE, len(cluster.gpus))
    size = min(size, num_gpus)
    return dataclasses.replace(cluster, gpus=(cluster.smallest,) * size, num_nodes=-(-num_gpus // size))


def _fewest_first(fitted: Fit) -> tuple[int, bool, bool, int, int]:
    """Sort key: few GPUs, then room for all requests, a KV cache that changes no answers, few replicas and stages."""
    layout = fitted.layout
    return layout.num_gpus, fitted.verdict == "tight", layout.kv != "auto", layout.data, layout.pipeline


def _heads(plan: Plan) -> Question:
    spec, size = plan.model.spec, len(plan.cluster.gpus)
    engine = plan.options[0].layout.engine if plan.options else "vllm"
    legal = [tensor for tensor in range(1, size + 1) if _is_legal(plan, tensor, engine)]
    heads = spec.layers[-1].attention.num_heads
    kv_heads = getattr(spec.layers[-1].attention, "num_kv_heads", None)
    shared = "one latent" if kv_heads is None else f"{kv_heads} KV heads"
    uneven = [tensor for tensor in legal if kv_heads is not None and max(kv_heads, tensor) % min(kv_heads, tensor)]
    answer = f"tensor parallel {', '.join(map(str, legal))}"
    if uneven:
        answer += f" ({', '.join(map(str, uneven))} unevenly, and not in vLLM)"
    return Question("do the heads divide?", f"{heads} heads, {shared}", answer)


def _is_legal(plan: Plan, tensor: int, engine: str) -> bool:
    if engine == "vllm":
        return not refusal(plan.model.spec, plan.model.stored(), Layout("vllm", tensor))
    try:
        check_tensor_parallel(plan.model.spec, tensor)
    except ValueError:
        return False
    return True


def _experts(plan: Plan) -> Question:
    routings = [layer.feed_forward.routing for layer in plan.model.spec.layers]
    routing = next((routing for routing in routings if routing is not None), None)
    if routing is None:
        return Question("dense or experts?", "no layer has experts", "dense: every step reads all weights")
    return Question(
        "dense or experts?",
        f"{routing.num_experts} experts, {routing.experts_per_token} a token",
        "experts: whole ones on ranks (ep) keep products wide, slices load ranks evenly",
    )


def _link(plan: Plan, best: Option) -> Question:
    """What exchanges need of the link, and what other links would make of it."""
    speed, cluster = best.speed, plan.cluster
    assert speed is not None
    ranks = max(best.layout.tensor, best.layout.expert_ranks, 2)
    rate = cluster.link_bytes_per_second(ranks)
    others = ", ".join(f"{name}: {_milliseconds(speed.exchange_bytes / value)}" for name, value in _INTERCONNECTS)
    return Question(
        f"which link? ({best.layout}; {rate / GB:g} GB/s each way between {ranks} GPUs)",
        f"{speed.exchange_bytes / 1e6:.1f} MB in {speed.exchange_messages} "
        f"exchange{'s' * (speed.exchange_messages != 1)} a step: {others}",
        f"links take {speed.link_share:.0%} of a decode step; below {speed.link_bytes_per_second / GB:.2g} GB/s they "
        "would take most of it",
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= _SHORTEST else "under 0.01 ms"


def _efficiency(plan: Plan, best: Option) -> Question:
    """What tensor parallelism would keep of its GPUs' speed, by the link."""
    parts: list[str] = []
    at_own: dict[int, float] = {}
    for name, rate in (("this link", None), *_INTERCONNECTS):
        shares = tensor_efficiency(plan, best, rate)
        at_own = at_own or shares
        parts.append(f"{name}: " + ", ".join(f"tp{size} {share:.0%}" for size, share in shares.items()))
    good = [size for size, share in at_own.items() if share >= _GOOD_EFFICIENCY]
    answer = f"tensor parallel up to {max(good)} pays" if good else "tensor parallelism shortens latency, at a cost"
    question = f"how much do tensor-parallel GPUs keep of their speed? (with the load and the formats of {best.layout})"
    return Question(question, "; ".join(parts), answer)


def tensor_efficiency(plan: Plan, option: Option, link_bytes_per_second: float | None = None) -> dict[int, float]:
    """For tensor-parallel sizes, the speed-up of a decode step divided by the size, if the link had this rate.

    None: the cluster's own link, which may join few GPUs only, or be slower between fewer. The step has as many
    requests as one of the option's replicas. Memory is ignored.
    """
    assert option.speed is not None
    spec, layout = plan.model.spec, option.layout
    running = option.speed.running / layout.data
    constants = plan.timing[layout.engine].constants
    context = plan.demand.input_len + plan.demand.output_len / 2
    times = {}
    for size in _EFFICIENCY_SIZES:
        joined = min(max(size, 2), max(len(plan.cluster.gpus), 2))
        rate = (link_bytes_per_second or plan.cluster.link_bytes_per_second(joined)) / GB
        link = GpuLink("any", rate, rate, size)
        gpus = (plan.cluster.slowest,) * size
        alone = layout.along(tensor=size)
        try:
            work = layout_work(plan.model, alone, dataclasses.replace(option.fit, stages=(Span(0, len(spec.layers)),)))
        except ValueError:
            continue
        cluster = dataclasses.replace(plan.cluster, gpus=gpus, num_nodes=1, link=link)
        times[size] = step_load(work, cluster, running, context, 0, 0).seconds(constants)
    return {size: times[1] / time / size for size, time in times.items() if size > 1}


def _bits(plan: Plan, best: Option) -> Question:
    """What the recommended quantization saves, against the best layout that keeps the checkpoint's answers."""
    own = bits_label(plan.model)
    kept = [option for option in plan.options if option.fits and not changes_answers(option, own)]
    figures = f"{best.layout}: {_price(best)}; "
    figures += f"{own}: {kept[0].layout}, {_price(kept[0])}" if kept else f"{own}: does not fit"
    if kept and kept[0].misses:
        figures += f", misses {kept[0].misses}"
    keep = " and ".join(
        flag
        for flag, is_changed in (
            ("--quantization none", best.layout.weights != own),
            ("--kv-cache-dtype auto", best.layout.kv != "auto"),
        )
        if is_changed
    )
    return Question(
        "fewer bits?",
        figures,
        f"answers change; {keep} {'keep' if ' and ' in keep else 'keeps'} those of the checkpoint",
    )


def _price(option: Option) -> str:
    """Dollars of an option, or tokens per second where no price is known."""
    assert option.speed is not None
    if option.cost_per_million is None:
        return f"{option.speed.output_tok_s.p50 / option.layout.num_gpus:,.0f} tok/s a GPU"
    return f"${option.cost_per_million:.2f} a million output tokens"


def _decision(plan: Plan, best: Option | None) -> Question:
    if best is not None:
        assert best.speed is not None
        figures = f"bound by {best.speed.bound_by}; memory {best.fit.verdict}"
        return Question(f"latency, throughput or cost? ({plan.goal})", figures, f"{best.layout}")
    fitting = [option for option in plan.options if option.fits]
    if not fitting:
        return Question("what then?", "no layout fits", "more or larger GPUs, fewer bits, a smaller model, or an API")
    return Question(
        "what then?",
        f"the nearest layout, {fitting[0].layout}, misses {fitting[0].misses}",
        "more GPUs, a weaker demand, a smaller model, or an API",
    )


def turns_yes(plan: Plan, option: Option) -> list[str]:
    """What would make a refused layout fit: another format on the same ranks, or shorter requests."""
    layout = option.layout
    ways = [
        f"{other.layout.weights} weights, {other.layout.kv} KV cache"
        for other in plan.options
        if other.fits and other.layout == dataclasses.replace(layout, weights=other.layout.weights, kv=other.layout.kv)
    ]
    if option.fit.max_context > 1:
        ways.append(f"--max-model-len {option.fit.max_context}")
    return ways
