"""The quick references: which layout guides name for a model on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.claims.base import DEEPSEEK, LLAMA_70B, LLAMA_405B, MIXTRAL, Claim, cluster, decided, model
from shardline.planner.layout import Demand
from shardline.planner.memory import bits_label
from shardline.planner.search import Fixed, Option, search

TITLE = "Which layout"


def claims() -> Iterator[Claim]:
    """All of them."""
    for quote, name, gpus, goal, named in (
        ("70B on 2 x H100 NVLink: TP 2", LLAMA_70B, "2xH100", "latency", (2, 1, 1, False)),
        ("70B on 4 x A100 PCIe for throughput: PP 4", LLAMA_70B, "4xA100-80GB-PCIe", "throughput", (1, 4, 1, False)),
        ("405B (FP8) on 8 x H100: TP 8", LLAMA_405B, "8xH100", "latency", (8, 1, 1, False)),
        ("405B on 2 x 8 H100: TP 8 x PP 2", LLAMA_405B, "2x8xH100", "latency", (8, 2, 1, False)),
        ("DeepSeek-V3 on 8 x H100: TP 8 + EP for latency", DEEPSEEK, "8xH100", "latency", (8, 1, 1, True)),
        ("DeepSeek-V3 on 8 x H100: DP 8 + EP for throughput", DEEPSEEK, "8xH100", "throughput", (1, 1, 8, True)),
        ("Mixtral on 2 x A100: TP 2 + EP", MIXTRAL, "2xA100-80GB", "latency", (2, 1, 1, True)),
        ("6 GPUs for a model with 64 heads: PP 6", LLAMA_70B, "6xH100", "latency", (1, 6, 1, False)),
        ("70B on 8 x L40S: PP 8", LLAMA_70B, "8xL40S", "latency", (1, 8, 1, False)),
    ):
        yield _claim(quote, name, gpus, goal, named)


def _claim(quote: str, name: str, gpus: str, goal: str, named: tuple[int, int, int, bool]) -> Claim:
    found = model(name)
    weights = "fp8" if name == LLAMA_405B and gpus == "8xH100" else bits_label(found)
    engine = "shardline" if gpus.startswith("6x") else "vllm"
    result = search(found, cluster(gpus), Demand(8192, 1024, 128), goal, engine, Fixed(weights=weights, kv="auto"))
    theirs = next((one for one in result.options if _sizes(one) == named), None)
    if result.recommended is None:
        why = "" if theirs is None else f": {theirs.fit.why_not}"
        return decided(quote, False, f"nothing fits{why}")
    best = result.options[0]
    told = f"{best.layout} ({_figures(best)})"
    if theirs is not None and theirs is not best:
        told += f"; theirs: {_figures(theirs)}"
    return decided(quote, _sizes(best) == named, told)


def _sizes(option: Option) -> tuple[int, int, int, bool]:
    layout = option.layout
    return layout.tensor, layout.pipeline, layout.data, layout.whole_experts


def _figures(option: Option) -> str:
    if option.speed is None:
        return f"does not fit: {option.fit.why_not}"
    return f"TPOT {1e3 * option.speed.tpot.p50:.0f} ms, {option.speed.output_tok_s.p50:,.0f} tok/s"
