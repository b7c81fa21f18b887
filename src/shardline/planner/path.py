"""The path to a plan in words: the questions that decide, with the figures that answered them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from shardline.models.attention import Attention
from shardline.models.partition import Span
from shardline.models.sharding import check_tensor_parallel
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GB, GIB, GpuLink
from shardline.planner.layout import Layout
from shardline.planner.memory import Fit, bits_label, fit, packed_bytes
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
    """One step of the path. Question and answer are one line of a page."""

    question: str
    figures: str
    answer: str


def explain_path(plan: Plan) -> list[Question]:
    """The questions that lead to the recommended layout, or to something else than these GPUs."""
    best = plan.best
    if plan.cluster.is_shared:  # ranks on the cores of one host have no links, and all of its memory
        return [_heads(plan), _experts(plan), _decision(plan, best)]
    questions = [_one_gpu(plan)]
    questions += [_heads(plan)] * (len(plan.cluster.gpus) > 1)
    questions.append(_experts(plan))
    linked = [option for option in plan.options if option.fits and option.layout.tensor * option.layout.pipeline > 1]
    if best is not None and linked:
        # If one GPU is enough, these are the figures of what more of them would need.
        joined = best if best.layout.num_gpus > 1 and best.speed and best.speed.exchange_messages else linked[0]
        questions += [_link(plan, joined), _efficiency(plan, joined)]
    if best is not None and (bits := _bits(plan, best)) is not None:
        questions.append(bits)
    questions.append(_decision(plan, best))
    return questions


def _one_gpu(plan: Plan) -> Question:
    """How many of these GPUs hold the model, by the weights' format. What the user has fixed stays fixed."""
    own, gpus = bits_label(plan.model), "+".join(dict.fromkeys(gpu.name for gpu in plan.cluster.gpus))
    labels = list(dict.fromkeys([own, *(option.layout.weights for option in plan.options)]))
    # Of this host's GPUs there are no more.
    most = _MOST_GPUS if plan.cluster.host is None else plan.cluster.num_gpus
    parts: list[str] = []
    fewest: dict[str, Fit] = {}
    for label in [plan.fixed.weights] if plan.fixed.weights else labels:
        fitted = fewest_gpus(plan, label, most)
        if fitted is None:
            parts.append(f"{label}: more than {most}")
            continue
        fewest[label] = fitted
        tight = f", {fitted.verdict}" if fitted.verdict == "tight" else ""
        size = f"{fitted.weight_bytes / GIB:.1f} GiB of weights each{tight}"
        parts.append(f"{label}: {fitted.layout.num_gpus} as {fitted.layout} ({size})")
    return Question(
        "one GPU? one node?",
        f"of {gpus}, for {_length(plan):,} tokens: {'; '.join(parts)}",
        _fewest_answer(plan, fewest, most),
    )


def _length(plan: Plan) -> int:
    """Tokens of the longest request."""
    return plan.demand.max_model_len or max(option.fit.max_model_len for option in plan.options)


def _fewest_answer(plan: Plan, fewest: Mapping[str, Fit], most: int) -> str:
    """How many GPUs, and why the recommended layout has more than the fewest that hold the model."""
    if not fewest:
        return f"more than {most} GPUs: rent larger ones, or use an API"
    least = min(fitted.layout.num_gpus for fitted in fewest.values())
    held = [label for label, fitted in fewest.items() if fitted.layout.num_gpus == least]
    best, own = plan.best, bits_label(plan.model)
    small = next((option for option in plan.options if option.fits and option.layout.num_gpus == least), None)
    if best is not None and small is not None and best.layout.num_gpus > least:
        return f"{best.layout.num_gpus} GPUs: {small.layout.weights} fits {least}, but {_drawback(plan, small, best)}"
    answer = "one GPU is enough" if least == 1 else f"{least} GPUs at least"
    if best is None and small is not None:
        answer = "one GPU holds it" if least == 1 else f"{least} GPUs hold it"
    if all(fewest[label].verdict == "tight" for label in held):
        answer = f"{least} GPU{'s' * (least > 1)} for fewer than {plan.demand.concurrency} requests at once"
    if own not in held and plan.fixed.weights is None:
        label = best.layout.weights if best is not None and best.layout.weights in held else held[0]
        return f"{answer} in {label}; {own} needs {fewest[own].layout.num_gpus if own in fewest else f'over {most}'}"
    size = len(plan.cluster.gpus)
    if least > 1 and packed_bytes(plan.model, fewest[held[0]]):
        packed = fewest_gpus(plan, held[0], most, "vllm")
        others = f"; {packed.layout.num_gpus} if it stayed packed" if packed is not None else ""
        return f"{answer}, as {held[0]} becomes bf16{others}"
    return answer + f"; one node has {size}" * (least > size)


def _drawback(plan: Plan, small: Option, best: Option) -> str:
    """Why a layout on fewer GPUs is not the recommended one."""
    assert best.speed is not None
    assert small.speed is not None
    tpot, price = 1e3 * small.speed.tpot.p50, _price(small)
    slower = f"has a TPOT of {tpot:.1f} ms, not {1e3 * best.speed.tpot.p50:.1f}"
    if small.misses:
        return f"misses {small.misses}"
    if small.fit.verdict == "tight":
        return f"has room for {small.fit.requests} request{'s' * (small.fit.requests > 1)} only"
    if small.may_miss and not best.may_miss:
        return f"may miss {small.may_miss}"
    if plan.goal == "latency":
        return slower
    if plan.goal == "throughput":
        return f"makes {small.speed.output_tok_s.p50:,.0f} tok/s, not {best.speed.output_tok_s.p50:,.0f}"
    if changes_answers(small, bits_label(plan.model)) and not changes_answers(best, bits_label(plan.model)):
        return f"changes answers, for {price}"
    if price == _price(best):
        return f"{slower}, for the same price"
    verb = "makes" if small.cost_per_million is None else "costs"
    return f"{verb} {price}, not {_price(best).partition(' a million')[0]}"


def fewest_gpus(plan: Plan, label: str, most: int = _MOST_GPUS, engine: str | None = None) -> Fit | None:
    """The layout on the fewest GPUs that holds weights of a label; None: more than `most` are needed.

    Up to the GPUs of the search, it is one of the search's own layouts. Beyond them, more of the smallest GPU are
    tried, each number up to a node and then whole nodes, without replicas. For another `engine` than the plan's, all
    numbers are tried.
    """
    searched = 0
    if engine is None:
        engine, searched = planned_engine(plan), plan.cluster.num_gpus
        own = [option.fit for option in plan.options if option.fits and option.layout.weights == label]
        if own:
            return min(own, key=_fewest_first)
    fixed = dataclasses.replace(plan.fixed, weights=label, data=plan.fixed.data or 1)
    node = max(_USUAL_NODE, len(plan.cluster.gpus))
    for size in (*range(1, node), *range(node, most + 1, node)):
        if searched < size <= most:
            wide = _more_gpus(plan.cluster, size)
            tried = (layout for layout in layouts(plan.model, wide, engine, fixed) if layout.num_gpus == size)
            fits = [
                fitted for fitted in (fit(plan.model, layout, wide, plan.demand) for layout in tried) if fitted.fits
            ]
            if fits:
                return min(fits, key=_fewest_first)
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


def planned_engine(plan: Plan) -> str:
    """The engine that the layouts are for."""
    return plan.options[0].layout.engine if plan.options else "vllm"


def _heads(plan: Plan) -> Question:
    attentions, engine = {layer.attention for layer in plan.model.spec.layers}, planned_engine(plan)
    legal = [tensor for tensor in range(1, len(plan.cluster.gpus) + 1) if _is_legal(plan, tensor, engine)]
    even = [tensor for tensor in legal if all(_divides_evenly(attention, tensor) for attention in attentions)]
    answer = f"tensor parallel {', '.join(map(str, even))}"
    if uneven := sorted({*legal} - {*even}):
        some = f"others up to {uneven[-1]}" if uneven[1:] else str(uneven[0])
        answer += f"; {some} unevenly, and not in vLLM"
    heads = plan.model.spec.layers[-1].attention
    shared = "one latent" if heads.num_kv_heads == 1 else f"{heads.num_kv_heads} KV heads"
    return Question("do the heads divide?", f"{heads.num_heads} heads, {shared}", answer)


def _divides_evenly(attention: Attention, ranks: int) -> bool:
    kv_heads = attention.num_kv_heads
    return not attention.num_heads % ranks and not max(kv_heads, ranks) % min(kv_heads, ranks)


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
    figures = f"{routing.num_experts} experts, {routing.experts_per_token} a token"
    best = plan.best
    if best is None:
        answer = "experts: whole ones on ranks (ep), or a slice of each on every rank"
    elif best.layout.whole_experts:
        answer = f"experts: whole ones, spread over {best.layout.expert_ranks} ranks (ep)"
    else:
        slices = best.layout.tensor > 1
        answer = f"experts: a slice of each on {best.layout.tensor} ranks" if slices else "experts: all on each rank"
    return Question("dense or experts?", figures, answer)


def _link(plan: Plan, joined: Option) -> Question:
    """What exchanges need of the link, and what other links would make of it."""
    speed, cluster = joined.speed, plan.cluster
    assert speed is not None
    ranks = max(joined.layout.tensor, joined.layout.expert_ranks, 2)
    rate = cluster.link_bytes_per_second(ranks)
    others = ", ".join(f"{name}: {_milliseconds(speed.exchange_bytes / value)}" for name, value in _INTERCONNECTS)
    share = f"take {speed.link_share:.0%} of a decode step"
    if joined is plan.best:
        answer = f"exchanges {share}; below {speed.link_bytes_per_second / GB:.2g} GB/s, most of it"
    else:
        answer = f"none needed; those of {joined.layout} would {share}"
    return Question(
        "which link?",
        f"{joined.layout}, {rate / GB:g} GB/s each way between {ranks} GPUs: {speed.exchange_bytes / 1e6:.1f} MB in "
        f"{speed.exchange_messages} exchange{'s' * (speed.exchange_messages != 1)} a step: {others}",
        answer,
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= _SHORTEST else "under 0.01 ms"


def _efficiency(plan: Plan, joined: Option) -> Question:
    """What tensor parallelism would keep of its GPUs' speed, by the link."""
    parts: list[str] = []
    at_own: dict[int, float] = {}
    for name, rate in (("this link", None), *_INTERCONNECTS):
        shares = tensor_efficiency(plan, joined, rate)
        at_own = at_own or shares
        parts.append(f"{name}: " + ", ".join(f"tp{size} {share:.0%}" for size, share in shares.items()))
    good = [size for size, share in at_own.items() if share >= _GOOD_EFFICIENCY]
    least = f"; {min(at_own)} GPUs keep {at_own[min(at_own)]:.0%} of their speed" if at_own else ""
    answer = f"up to {max(good)} GPUs pay" if good else f"it shortens latency, at a cost{least}"
    figures = f"of their speed, with the load and the formats of {joined.layout}, keep over {'; '.join(parts)}"
    return Question("tensor parallel?", figures, answer)


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


def _bits(plan: Plan, best: Option) -> Question | None:
    """What quantization saves, against the best layout that keeps the checkpoint's answers; None: nothing."""
    own = bits_label(plan.model)
    if not changes_answers(best, own):
        return _fewer_bits(plan, best)
    kept = [option for option in plan.options if option.fits and not changes_answers(option, own)]
    figures = f"{best.layout}: {_price(best)}; "
    if not kept:
        return Question("fewer bits?", f"{figures}{own}: does not fit", f"answers change; {own} does not fit here")
    figures += f"{own}: {kept[0].layout}, {_price(kept[0])}"
    if missed := kept[0].misses:
        return Question("fewer bits?", f"{figures}, misses {missed}", f"answers change; {own} misses {missed}")
    flags = [
        flag
        for flag, is_changed in (
            ("--quantization none", best.layout.weights != own),
            ("--kv-cache-dtype auto", best.layout.kv != "auto"),
        )
        if is_changed
    ]
    price = f" for {_price(kept[0]).partition(' a million')[0]}" * (kept[0].cost_per_million is not None)
    return Question("fewer bits?", figures, f"answers change; kept{price} by {' '.join(flags)}")


def _fewer_bits(plan: Plan, best: Option) -> Question | None:
    """What a cheaper layout would save that changes answers; None: there is none."""
    priced = [option for option in plan.options if option.is_good and option.cost_per_million]
    cheapest = min(priced, key=lambda option: option.cost_per_million or 0.0, default=best)
    if plan.goal != "cost" or not best.cost_per_million or cheapest.layout == best.layout:
        return None
    saved = 1 - (cheapest.cost_per_million or 0.0) / best.cost_per_million
    figures = f"{best.layout}: {_price(best)}; {cheapest.layout}: {_price(cheapest)}"
    return Question("fewer bits?", figures, f"no: {cheapest.layout} saves {saved:.0%}, and changes answers")


def _price(option: Option) -> str:
    """Dollars of an option, or tokens per second where no price is known."""
    assert option.speed is not None
    if option.cost_per_million is None:
        return f"{option.speed.output_tok_s.p50 / option.layout.num_gpus:,.0f} tok/s a GPU"
    return f"${option.cost_per_million:.2f} a million output tokens"


def _decision(plan: Plan, best: Option | None) -> Question:
    if best is not None:
        assert best.speed is not None
        figures = f"memory {best.fit.verdict}; links take {best.speed.link_share:.0%} of a decode step"
        return Question("which goal?", figures, f"{plan.goal}: {best.layout}, bound by {best.speed.bound_by}")
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
