"""What a claim is, and how the planner is asked for its figure."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from shardline.planner.catalog import find_model
from shardline.planner.cluster import Cluster, parse_cluster
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Demand, Layout
from shardline.planner.search import Option, evaluate
from shardline.planner.speed import Speed

Verdict = Literal["reproduced", "corrected", "unchecked"]

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
LLAMA_405B, DEEPSEEK = "meta-llama/Llama-3.1-405B-Instruct", "deepseek-ai/DeepSeek-V3"
MIXTRAL, QWEN_32B = "mistralai/Mixtral-8x7B-Instruct-v0.1", "Qwen/Qwen2.5-32B-Instruct"

_TOLERANCE = 0.1
"""A figure within a tenth of the claimed one reproduces it: guides round."""

model = functools.cache(find_model)


@dataclass(frozen=True)
class Claim:
    """A quoted claim, and what we find."""

    quote: str
    ours: str
    verdict: Verdict


def against(quote: str, low: float, high: float, figure: float, ours: str) -> Claim:
    """A claim of a figure from `low` to `high`. `ours` is the text; "{}" in it stands for our figure."""
    is_near = low * (1 - _TOLERANCE) <= figure <= high * (1 + _TOLERANCE)
    return Claim(quote, ours.format(short(figure)), "reproduced" if is_near else "corrected")


def decided(quote: str, holds: bool, ours: str) -> Claim:
    """A claim that holds or does not."""
    return Claim(quote, ours, "reproduced" if holds else "corrected")


def unchecked(quote: str, missing: str) -> Claim:
    """A claim that needs a fact which is missing."""
    return Claim(quote, f"missing: {missing}", "unchecked")


def short(value: float) -> str:
    """A number with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@functools.cache
def cluster(gpus: str, link: str | None = None, network: str | None = None) -> Cluster:
    """GPUs as users write them."""
    return parse_cluster(gpus, known_gpus(), link, network)


@functools.cache
def option(name: str, gpus: str, layout: Layout, demand: Demand, link: str | None = None) -> Option:
    """A layout of a model on GPUs, by vLLM's accounting."""
    return evaluate(model(name), replace(layout, engine="vllm"), cluster(gpus, link), demand)


def speed(
    name: str,
    gpus: str,
    layout: Layout,
    running: int | None,
    input_len: int = 1024,
    output_len: int = 128,
    link: str | None = None,
) -> Speed:
    """What requests see of a layout that fits."""
    length = input_len + output_len
    found = option(name, gpus, layout, Demand(length, input_len, output_len, running=running), link).speed
    assert found is not None, f"{layout} of {name} does not fit {gpus}"
    return found
