"""The path to a plan in words: the questions that decide, with the figures that answered them."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.models.partition import check_tensor_parallel
from shardline.models.spec import MoE
from shardline.planner.hardware import GB, GIB
from shardline.planner.layout import Layout
from shardline.planner.memory import Fit, bits_label
from shardline.planner.questions import fewest_gpus, tensor_efficiency
from shardline.planner.search import Option, Search, changes_answers
from shardline.planner.vllm import refusal

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


def explain_path(found: Search) -> list[Question]:
    """The questions that lead to the recommended layout, or to something else than these GPUs."""
    best = found.options[found.recommended] if found.recommended is not None else None
    questions = [_one_gpu(found), _heads(found), _experts(found)]
    linked = [one for one in found.options if one.fits and one.layout.tensor * one.layout.pipeline > 1]
    if best is not None and linked:
        # If one GPU is enough, these are the figures of what more of them would need.
        joined = best if best in linked else linked[0]
        questions += [_link(found, joined), _efficiency(found, joined)]
    if best is not None and changes_answers(best, bits_label(found.model)):
        questions.append(_bits(found, best))
    questions.append(_decision(found, best))
    return questions


def _bits(found: Search, best: Option) -> Question:
    """What the recommended quantization saves, against the best layout that keeps the checkpoint's answers."""
    own = bits_label(found.model)
    kept = [one for one in found.options if one.fits and not changes_answers(one, own)]
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


def _one_gpu(found: Search) -> Question:
    """How many of these GPUs hold the model, by the weights' format. What the user has fixed stays fixed."""
    own, gpus = bits_label(found.model), "+".join(dict.fromkeys(gpu.name for gpu in found.cluster.gpus))
    labels = list(dict.fromkeys([own, *(one.layout.weights for one in found.options)]))
    parts, fewest = [], []
    for label in [found.fixed.weights] if found.fixed.weights else labels:
        one = fewest_gpus(found, label, _MOST_GPUS)
        if one is None:
            parts.append(f"{label}: more than {_MOST_GPUS}")
            continue
        fewest.append(one)
        tight = f", {one.verdict}" if one.verdict == "tight" else ""
        parts.append(f"{label}: {one.layout.num_gpus} as {one.layout} ({one.weight_bytes / GIB:.1f} GiB of weights "
                     f"each{tight})")  # fmt: skip
    return Question(
        f"one GPU? one node? ({gpus}, {found.demand.max_model_len:,} tokens)",
        "; ".join(parts),
        _fewest_answer(found, fewest),
    )


def _fewest_answer(found: Search, fewest: list[Fit]) -> str:
    if not fewest:
        return f"more than {_MOST_GPUS} GPUs: rent larger ones, or use an API"
    least = min(one.layout.num_gpus for one in fewest)
    answer = "one GPU is enough" if least == 1 else f"{least} GPUs at least"
    if all(one.verdict == "tight" for one in fewest if one.layout.num_gpus == least):
        answer = f"{least} GPU{'s' * (least > 1)} for fewer than {found.demand.concurrency} such requests at once"
    size = len(found.cluster.gpus)
    return answer + f", so it does not fit one node of {size}" * (least > size)


def _heads(found: Search) -> Question:
    spec, size = found.model.spec, len(found.cluster.gpus)
    engine = found.options[0].layout.engine if found.options else "vllm"
    legal = [tensor for tensor in range(1, size + 1) if _is_legal(found, tensor, engine)]
    heads = spec.layers[-1].attention.num_heads
    kv_heads = getattr(spec.layers[-1].attention, "num_kv_heads", None)
    shared = "one latent" if kv_heads is None else f"{kv_heads} KV heads"
    uneven = [tensor for tensor in legal if kv_heads is not None and max(kv_heads, tensor) % min(kv_heads, tensor)]
    answer = f"tensor parallel {', '.join(map(str, legal))}"
    if uneven:
        answer += f" ({', '.join(map(str, uneven))} unevenly, and not in vLLM)"
    return Question("do the heads divide?", f"{heads} heads, {shared}", answer)


def _is_legal(found: Search, tensor: int, engine: str) -> bool:
    if engine == "vllm":
        return not refusal(found.model.spec, found.model.stored(), Layout("vllm", tensor))
    try:
        check_tensor_parallel(found.model.spec, tensor)
    except ValueError:
        return False
    return True


def _experts(found: Search) -> Question:
    blocks = [one.feed_forward for one in found.model.spec.layers if isinstance(one.feed_forward, MoE)]
    if not blocks:
        return Question("dense or experts?", "no layer has experts", "dense: every step reads all weights")
    routing = blocks[0].routing
    return Question(
        "dense or experts?",
        f"{routing.num_experts} experts, {routing.experts_per_token} a token",
        "experts: whole ones on ranks (ep) keep products wide, slices load ranks evenly",
    )


def _link(found: Search, best: Option) -> Question:
    """What exchanges need of the link, and what other links would make of it."""
    speed, cluster = best.speed, found.cluster
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


def _efficiency(found: Search, best: Option) -> Question:
    """What tensor parallelism would keep of its GPUs' speed, by the link."""
    parts: list[str] = []
    at_own: dict[int, float] = {}
    for name, rate in (("this link", None), *_INTERCONNECTS):
        shares = tensor_efficiency(found, best, rate)
        at_own = at_own or shares
        parts.append(f"{name}: " + ", ".join(f"tp{size} {share:.0%}" for size, share in shares.items()))
    good = [size for size, share in at_own.items() if share >= _GOOD_EFFICIENCY]
    answer = f"tensor parallel up to {max(good)} pays" if good else "tensor parallelism shortens latency, at a cost"
    question = f"how much do tensor-parallel GPUs keep of their speed? (with the load and the formats of {best.layout})"
    return Question(question, "; ".join(parts), answer)


def _decision(found: Search, best: Option | None) -> Question:
    if best is not None:
        assert best.speed is not None
        figures = f"bound by {best.speed.bound_by}; memory {best.fit.verdict}"
        return Question(f"latency, throughput or cost? ({found.goal})", figures, f"{best.layout}")
    fitting = [one for one in found.options if one.fits]
    if not fitting:
        return Question("what then?", "no layout fits", "more or larger GPUs, fewer bits, a smaller model, or an API")
    return Question(
        "what then?",
        f"the nearest layout, {fitting[0].layout}, misses {fitting[0].misses}",
        "more GPUs, a weaker demand, a smaller model, or an API",
    )
