"""How long steps take, and what requests see of it: TTFT, TPOT, tokens per second.

A step's time is one formula for prefill and decode together. Products read weights once for all tokens of the step, so
they take the larger of the time to read and the time to compute. Attention to cached tokens reads the cache. Exchanges,
launches and the host's work come on top.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shardline.models.step_work import StepWork
from shardline.planner.cluster import Cluster


@dataclass(frozen=True)
class Constants:
    """The physical constants of an engine. They are fitted to published rows; see `timing.json` and docs/planner.md."""

    memory: float
    """Share of the memory's bandwidth at which weights are read."""
    cache: float
    """Share of the bandwidth at which keys and values are read."""
    compute: float
    """Share of the arithmetic rate that large products reach."""
    link: float
    """Share of a link's rate that large exchanges reach."""
    message: float
    """Seconds of an exchange in addition to its bytes."""
    layer: float
    """Seconds of a layer's launches."""
    expert_layer: float
    """Additional seconds of a layer with experts."""
    step: float
    """Seconds of a step on the host."""
    request: float
    """Seconds of a step for each running request."""
    first: float
    """Seconds that a request's first token takes besides steps: HTTP, tokens, scheduling."""
    queue: float
    """Wait of a prompt for others, in steps with its prompt, for each square root of a running request."""


T = TypeVar("T", bound=Any)
_LOOP_ROUNDS = 4
CONSTANT_NAMES = tuple(one.name for one in fields(Constants))


class StepLoad(NamedTuple):
    """A step of one stage in ideal seconds, and what adds overhead."""

    weights: float
    """Seconds to read the weights at the full bandwidth."""
    cache: float
    """Seconds to read keys, values and states."""
    arithmetic: float
    """Seconds to compute at the full rate."""
    exchange: float
    """Seconds to receive the exchanged bytes at the full rate of the link."""
    messages: float
    layers: float
    expert_layers: float
    requests: float

    def seconds(self, constants: Constants) -> float:
        """Time of the step."""
        products = max(self.weights / constants.memory, self.arithmetic / constants.compute)
        return products + self.cache / constants.cache + self.overhead(constants)

    def overhead(self, constants: Constants) -> float:
        """Time of exchanges, launches and the host."""
        return (
            self.exchange / constants.link
            + self.messages * constants.message
            + self.layers * constants.layer
            + self.expert_layers * constants.expert_layer
            + constants.step
            + self.requests * constants.request
        )

    def bound_by(self, constants: Constants) -> str:
        """The largest part of the step's time."""
        reads, computes = self.weights / constants.memory, self.arithmetic / constants.compute
        parts = {
            "weights" if reads >= computes else "arithmetic": max(reads, computes),
            "KV cache": self.cache / constants.cache,
            "links": self.link_seconds(constants),
            "overhead": self.overhead(constants) - self.link_seconds(constants),
        }
        return max(parts, key=lambda name: parts[name])

    def link_seconds(self, constants: Constants) -> float:
        """Time of the exchanges."""
        return self.exchange / constants.link + self.messages * constants.message


def step_load(
    work: StepWork,
    cluster: Cluster,
    compute: str,
    num_seqs: float,
    context: float,
    prompt_tokens: float,
    prompt_seen: float,
) -> StepLoad:
    """A step of `num_seqs` decoding sequences of `context` tokens, and a chunk of `prompt_tokens` tokens.

    Each of the chunk's tokens attends to `prompt_seen` tokens on average. `compute` is the format of the arithmetic.
    """
    gpu = cluster.slowest
    bandwidth, tokens = gpu.bandwidth_gbs * 1e9, num_seqs + prompt_tokens
    sampled = num_seqs + (1 if prompt_tokens else 0)
    flops = work.flops(num_seqs, sampled, 0.0) + work.flops(prompt_tokens, 0.0, prompt_seen)
    exchanged = sum(
        traffic.num_bytes * tokens / cluster.link_bytes_per_second(ranks) for traffic, ranks in work.exchanges
    )
    exchanged += work.hand_off.num_bytes * tokens / cluster.link_bytes_per_second(cluster.num_gpus)
    return StepLoad(
        weights=work.weight_bytes(tokens) / bandwidth,
        cache=work.cache_bytes(num_seqs, context) / bandwidth,
        arithmetic=flops / gpu.flops_per_second(compute),
        exchange=exchanged,
        messages=sum(traffic.num_messages for traffic, _ in work.exchanges) + work.hand_off.num_messages,
        layers=work.num_layers,
        expert_layers=work.num_expert_layers,
        requests=num_seqs,
    )


class Load(NamedTuple):
    """A closed loop: `running` requests at once on a replica, each with a prompt and an output."""

    running: float
    input_len: float
    output_len: float
    chunk: int
    """Most prompt tokens in a step."""


class LoopSteps(NamedTuple):
    """The two kinds of step of a closed loop, and how often the second occurs."""

    decode: StepLoad
    mixed: StepLoad
    """With a chunk of a prompt."""
    chunks: float
    """Chunks of one prompt."""
    stages: int
    running: float
    output_len: float


def loop_steps(work: StepWork, cluster: Cluster, compute: str, load: Load, stages: int) -> LoopSteps:
    """The steps of a closed loop. A pipeline has `stages` steps in flight, each with its share of the requests."""
    in_step = load.running / stages
    context = load.input_len + load.output_len / 2
    chunks = math.ceil(load.input_len / load.chunk)
    chunk = load.input_len / chunks
    decode = step_load(work, cluster, compute, in_step, context, 0, 0)
    mixed = step_load(work, cluster, compute, in_step, context, chunk, load.input_len / 2)
    return LoopSteps(decode, mixed, chunks, stages, load.running, load.output_len)


class Latency(NamedTuple):
    """Medians of a closed loop, in seconds, and tokens per second of one replica."""

    ttft: float
    tpot: float
    output_tokens_per_second: float


def loop_step_seconds(decode: T, mixed: T, chunks: T, running: T, output_len: T) -> T:
    """Mean time of the steps that one request sees after its first token; numbers or equal arrays.

    `decode` and `mixed` are the times of both kinds of step. While a request takes its own chunks and its steps, each
    of the other `running` - 1 requests takes `chunks` mixed steps, which last longer by the difference.
    """
    longer = (mixed - decode + abs(mixed - decode)) / 2
    mean = decode
    for _ in range(_LOOP_ROUNDS):
        mean = decode + (running - 1) * chunks * longer / (output_len + chunks * mixed / mean)
    return mean


def loop_latency(steps: LoopSteps, constants: Constants) -> Latency:
    """What requests of a closed loop see."""
    decode, mixed = steps.decode.seconds(constants), steps.mixed.seconds(constants)
    stages = steps.stages
    tpot = stages * loop_step_seconds(decode, mixed, steps.chunks, steps.running / stages, steps.output_len)
    own = steps.chunks * mixed * stages
    ttft = constants.first + own * (1 + constants.queue * math.sqrt(steps.running))
    total = ttft + tpot * max(0.0, steps.output_len - 1)
    return Latency(ttft, tpot, steps.running * steps.output_len / total)


class Interval(NamedTuple):
    """A prediction: the median, and the bounds of its 80% interval."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class Timing:
    """Constants, and how far predictions with them are from measurements."""

    constants: Constants
    spread: Mapping[str, tuple[float, float]]
    """For "ttft", "tpot" and "output_tok_s": factors from a prediction to the bounds of its 80% interval."""
    calibrated: Mapping[str, tuple[float, float]] | None = None
    """The same for a machine that was measured at another load; None: not known."""

    def interval(self, quantity: str, value: float) -> Interval:
        """The 80% interval of a predicted `quantity`."""
        low, high = self.spread[quantity]
        return Interval(value * low, value, value * high)


@functools.cache
def shipped_timing() -> Mapping[str, Timing]:
    """For each engine, the constants fitted to published rows. This engine's are vLLM's, until there are rows of it."""
    values = json.loads(Path(__file__).with_name("timing.json").read_text(encoding="utf-8"))
    found = {
        engine: Timing(Constants(**one["constants"]), _spread(one["spread"]), _spread(values["calibrated"]))
        for engine, one in values["engines"].items()
    }
    return {**found, "shardline": found["vllm"]}


def _spread(bounds: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {name: (low, high) for name, (low, high) in bounds.items()}
