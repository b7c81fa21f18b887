"""How long steps take, and what requests see of it: TTFT, TPOT, tokens per second.

A step's time is one formula for prefill and decode together. Products read weights once for all tokens of the step, so
they take the larger of the time to read and the time to compute. Attention to cached tokens reads the cache. Exchanges,
launches and the host's work come on top. An engine's constants are fitted; see `timing.json` and docs/planner.md.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardline.models.step_work import StepWork
from shardline.planner.cluster import Cluster


@dataclass(frozen=True)
class Constants:
    """The physical constants of an engine. They are fitted to published rows; see `timing.json` and docs/planner.md."""

    memory: float
    """Share of the memory's bandwidth at which weights are read."""
    cache: float
    """Share of the bandwidth at which keys and values are read, and activations are moved."""
    compute: float
    """Share of the arithmetic rate that large products reach."""
    link: float
    """Share of a link's rate that large exchanges reach."""
    message: float
    """Seconds of an exchange in addition to its bytes."""
    launch: float
    """Seconds of a kernel in addition to what it reads and computes."""
    step: float
    """Seconds of a step on the host."""
    request: float
    """Seconds of a step for each running request."""
    first: float
    """Seconds that a request's first token takes besides steps: HTTP, tokens, scheduling."""
    shown: float
    """Decode steps before a prompt's step begins and until its token is sent: the step in flight, and streaming."""
    together: float
    """Share of the wait of prompts that all come at once that is left after the start of a benchmark.

    Requests of unlike lengths that begin together still end near each other.
    """
    queue: float
    """Wait for others among requests of equal lengths, in times of the prompt, for each further root of a request.

    Such requests stay in groups.
    """
    attention: float
    """Share of `compute` that attention of prompts reaches."""
    expanded: float
    """Share of `compute` that grouped products of experts reach with weights in a format that the GPU does not have."""
    saturated: float
    """Share of the speed of a closed loop that a saturated run reaches.

    Its GPUs lower their clocks at full power, batches are padded to captured sizes, and the last requests run alone.
    """


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
    timings = {
        engine: Timing(Constants(**fitted["constants"]), _spread(fitted["spread"]), _spread(values["calibrated"]))
        for engine, fitted in values["engines"].items()
    }
    return {**timings, "shardline": timings["vllm"]}


def _spread(bounds: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {name: (low, high) for name, (low, high) in bounds.items()}


_LOOP_ROUNDS = 4
_LITTLE_ROUNDS = 12
USUAL_ROUNDS = 10.0
"""Requests of a benchmark for each that runs at once, where nothing is stated."""
_STORAGE_SHARE = 0.82
"""Of a disk's rate: what is left for reads while the cores compute (`perf/weight_stream.py`)."""
_READ_AHEAD_SHARE = 0.5
"""See `runtime/machines/host/expert_stream.py`."""
_FULLEST_QUEUE = 0.98
"""Most of its time that a replica is taken to compute prompts, for the wait of a prompt: a full queue has no end."""


class StepLoad(NamedTuple):
    """A step of one stage in ideal seconds, and what adds overhead. For fits, every field is an array of many steps."""

    weights: float
    """Seconds to read the weights at the full bandwidth."""
    cache: float
    """Seconds to read keys, values and states, or to compute with them if that takes longer.

    The time to move activations is added.
    """
    arithmetic: float
    """Seconds to compute at the full rate, without what follows."""
    expanded: float
    """Seconds to compute experts whose weights are expanded to 16 bits, at the full rate."""
    attention: float
    """Seconds to compute the attention of prompts, at the full rate."""
    exchange: float
    """Seconds to receive the exchanged bytes at the full rate of the link."""
    messages: float
    launches: float
    requests: float
    storage: float = 0.0
    """Seconds to read weights from a disk, while the rest of the step goes on."""
    waits: float = 0.0
    """Seconds to read experts from a disk, while nothing goes on."""

    def seconds(self, constants: Constants) -> float:
        reads, computes = self.weights / constants.memory, self.computing(constants)
        products = _larger(reads, computes)
        return _larger(products + self.cache / constants.cache + self.overhead(constants), self.storage) + self.waits

    def computing(self, constants: Constants) -> float:
        """Time to compute products, and the attention of prompts."""
        ideal = self.arithmetic + self.expanded / constants.expanded + self.attention / constants.attention
        return ideal / constants.compute

    def overhead(self, constants: Constants) -> float:
        """Time of exchanges, launches and the host."""
        return (
            self.exchange / constants.link
            + self.messages * constants.message
            + self.launches * constants.launch
            + constants.step
            + self.requests * constants.request
        )

    def bound_by(self, constants: Constants) -> str:
        if self.seconds(constants) <= self.storage + 2 * self.waits:
            return "storage"
        reads, computes = self.weights / constants.memory, self.computing(constants)
        parts = {
            "weights" if reads >= computes else "arithmetic": max(reads, computes),
            "KV cache": self.cache / constants.cache,
            "links": self.link_seconds(constants),
            "overhead": self.overhead(constants) - self.link_seconds(constants),
        }
        return max(parts, key=lambda name: parts[name])

    def link_seconds(self, constants: Constants) -> float:
        return self.exchange / constants.link + self.messages * constants.message


def step_load(
    work: StepWork,
    cluster: Cluster,
    num_seqs: float,
    context: float,
    prompt_tokens: float,
    prompt_seen: float,
    guesses: float = 0.0,
) -> StepLoad:
    """A step of `num_seqs` decoding sequences of `context` tokens, and a chunk of `prompt_tokens` tokens.

    Each of the chunk's tokens attends to `prompt_seen` tokens on average. A sequence has a draft of `guesses` tokens.
    """
    gpu = cluster.slowest
    decoded = num_seqs * (1 + guesses)
    bandwidth, tokens = gpu.bandwidth_gbs * 1e9, decoded + prompt_tokens
    sampled = decoded + (1 if prompt_tokens else 0)
    rate = gpu.flops_per_second
    attention = rate(work.plain)
    arithmetic, expanded = work.product_seconds(tokens, sampled, rate, gpu.computes)
    decode_attention = work.decode_attention_flops(decoded, context) / attention
    exchanged = sum(
        traffic.num_bytes * tokens / cluster.link_bytes_per_second(ranks) for traffic, ranks in work.exchanges
    )
    read, waits = work.streamed_bytes, 0.0
    if work.streamed_expert_bytes:
        share = work.share_met(tokens)
        if share > _READ_AHEAD_SHARE:
            # Reads go on while a layer computes. Its own experts stay until then, and others leave for them.
            read += share * (work.streamed_expert_bytes + work.expert_layer_bytes)
        else:
            waits = share * work.streamed_expert_bytes
    disk = _STORAGE_SHARE * gpu.storage_gbs * 1e9
    exchanged += work.hand_off.num_bytes * tokens / cluster.link_bytes_per_second(cluster.num_gpus)
    return StepLoad(
        weights=work.weight_bytes(tokens) / bandwidth,
        cache=max(work.cache_bytes(num_seqs, context) / bandwidth, decode_attention)
        + tokens * work.activation_bytes / bandwidth,
        arithmetic=arithmetic,
        expanded=expanded,
        attention=work.prefill_attention_flops(prompt_tokens, prompt_seen) / attention,
        exchange=exchanged,
        messages=sum(traffic.num_messages for traffic, _ in work.exchanges) + work.hand_off.num_messages,
        launches=work.num_launches,
        requests=num_seqs,
        storage=read / disk if read else 0.0,
        waits=waits / disk if waits else 0.0,
    )


class Load(NamedTuple):
    """A closed loop: `running` requests at once on a replica, each with a prompt and an output."""

    running: float
    input_len: float
    output_len: float
    chunk: int
    """Most prompt tokens in a step."""
    prefill_first: bool = False
    """Whether prompts have steps of their own, before any request decodes again."""
    in_phase: bool = False
    """Whether requests of equal length start and end together, as they do if prompts come first."""
    equal_lengths: bool = False
    """Whether all requests have the same lengths, so that those that begin together end together."""
    rounds: float = USUAL_ROUNDS
    """Requests of the whole run for each that runs at once."""
    arrivals: float = 0.0
    """Requests that arrive in a second at random times, if the load is no closed loop; 0: it is one."""
    lockstep: int = 1
    """Replicas of which none begins a step before all have ended theirs."""
    prompts_apart: bool = False
    """Whether other GPUs compute the prompts."""
    saturated: bool = False
    """Whether requests wait at all times, so that each one that ends is replaced at once.

    Then all requests of a round begin together, and so do prompts on replicas in lockstep.
    """


class LoopSteps(NamedTuple):
    """The kinds of step of a closed loop, and how often they occur. For fits, all numbers are arrays of many loops."""

    decode: StepLoad
    prompt: StepLoad
    """With a chunk of one prompt, or in a saturated run with as many whole prompts as a step may have.

    Unless prompts come first, all running requests decode in it too.
    """
    burst: StepLoad
    """With as many tokens of all prompts as a step may have. Requests in phase have only such steps for prompts."""
    chunks: float
    """Chunks of one prompt."""
    bursts: float
    """Bursts that all prompts need."""
    prompt_steps: float
    """Steps with prompts while as many requests as run are served."""
    stages: int
    load: Load

    def seconds(self, constants: Constants) -> tuple[Any, Any, Any]:
        """Times of the kinds of step: decode, prompt, burst."""
        return self.decode.seconds(constants), self.prompt.seconds(constants), self.burst.seconds(constants)


def loop_steps(work: StepWork, cluster: Cluster, load: Load, stages: int) -> LoopSteps:
    """The steps of a closed loop. A pipeline has `stages` steps in flight, each with its share of the requests."""
    in_step = load.running / stages
    context = load.input_len + load.output_len / 2
    chunks = math.ceil(load.input_len / load.chunk)
    chunk = load.input_len / chunks
    together = 1
    if load.saturated and chunks == 1:
        together = max(1, int((load.chunk - in_step) // load.input_len))
    decode = step_load(work, cluster, in_step, context, 0, 0)
    # The request of the prompt itself does not decode yet.
    is_apart = load.prefill_first or load.prompts_apart
    decoding = 0.0 if is_apart else max(0.0, in_step - 1)
    prompt = step_load(work, cluster, decoding, context, together * chunk, load.input_len / 2)
    prompts = in_step * load.input_len
    bursts = math.ceil(prompts / load.chunk)
    burst = step_load(work, cluster, 0, 0, prompts / bursts, load.input_len / 2)
    return LoopSteps(decode, prompt, burst, chunks, bursts, in_step * chunks / together, stages, load)


class Latency(NamedTuple):
    """Medians of a closed loop, in seconds, and tokens per second of one replica."""

    ttft: float
    tpot: float
    output_tokens_per_second: float


def loop_tpot(loop: LoopSteps, constants: Constants) -> Any:
    """Time of an output token after the first: the mean time of the steps that a request sees.

    While a request takes its own chunks and its steps, each of the others takes `chunks` steps with a prompt, which
    last longer by the difference. In lockstep, a step also lasts longer if another replica has a prompt. Requests in
    phase wait only for the bursts after their own: on average for half of them. In a saturated run, each output token
    of a round has its share of the steps with prompts.
    """
    decode, prompt, burst = loop.seconds(constants)
    load = loop.load
    with_prompt = prompt + load.prefill_first * decode
    longer = (with_prompt - decode + abs(with_prompt - decode)) / 2
    others = load.running / loop.stages - 1
    others = (1 - load.prompts_apart) * (others + abs(others)) / 2
    mean = decode
    for _ in range(_LOOP_ROUNDS):
        share = others * loop.chunks / (load.output_len + loop.chunks * with_prompt / mean)
        without = (1 - share + abs(1 - share)) / 2
        mean = decode + longer * (share + without - without**load.lockstep)
    together = decode + burst * (loop.bursts - 1) / 2 / load.output_len
    closed = load.in_phase * together + (1 - load.in_phase) * mean
    full = decode + longer * loop.prompt_steps / load.output_len
    tpot = loop.stages * (load.saturated * full + (1 - load.saturated) * closed)
    return tpot / constants.saturated**load.saturated


class FirstToken(NamedTuple):
    """What the time to the first token consists of, in seconds or as arrays of them; see `Constants`."""

    alone: Any
    """Until a prompt is computed if it waits for no other."""
    shown: Any
    """For each unit of `shown`."""
    together: Any
    """If all prompts come at once."""
    start: Any
    """Share of the requests that come at the start of the run, all together."""
    unequal: Any
    """1 if the lengths of requests differ, else 0."""
    queue: Any
    """For each unit of `queue`."""

    def wait(self, constants: Constants) -> Any:
        share = _smaller(1.0, self.start + constants.together * self.unequal)
        return share * self.together + (1 - share) * constants.queue * self.queue

    def seconds(self, constants: Constants) -> Any:
        return constants.first + self.alone + constants.shown * self.shown + self.wait(constants)


def _smaller(first: Any, second: Any) -> Any:
    """The smaller of two numbers, or of two arrays element by element."""
    return (first + second - abs(first - second)) / 2


def _larger(first: float, second: float) -> float:
    return (first + second + abs(first - second)) / 2


def loop_first_token(loop: LoopSteps, constants: Constants) -> FirstToken:
    """The parts of the time to the first token.

    In a closed loop, prompts come together at the start and partly later. Requests in phase always do. Prompts that
    arrive at random times wait as in a queue with equal service times (M/D/1): by the share of its time that a replica
    computes prompts.
    """
    decode, prompt, burst = loop.seconds(constants)
    load = loop.load
    own = loop.stages * loop.chunks * (prompt + load.prefill_first * decode)
    burst_wait = loop.stages * burst * (loop.bursts + 1) / 2 - own
    burst_wait = (burst_wait + abs(burst_wait)) / 2
    is_random = load.arrivals > 0
    each = burst * loop.bursts * loop.stages / load.running
    share = _smaller(_FULLEST_QUEUE, load.arrivals * each)
    random = each * share / (1 - share) / 2
    closed = (1 - is_random) * (1 - load.in_phase)
    return FirstToken(
        own + load.in_phase * burst_wait + is_random * random,
        loop.stages * decode * (load.output_len > 1),
        closed * burst_wait,
        1 / load.rounds,
        1 - load.equal_lengths,
        closed * load.equal_lengths * own * (load.running**0.5 - 1),
    )


def loop_latency(loop: LoopSteps, constants: Constants) -> Latency:
    load, tpot = loop.load, loop_tpot(loop, constants)
    ttft = float(loop_first_token(loop, constants).seconds(constants))
    if load.saturated:
        return Latency(ttft, tpot, load.running / tpot)
    total = ttft + tpot * max(0.0, load.output_len - 1)
    return Latency(ttft, tpot, load.running * load.output_len / total)


def by_little(rate: float, most: float, at: Callable[[float], Latency], output_len: float) -> tuple[float, bool]:
    """Requests running at once if `rate` arrive per second at a replica (Little's law), and whether it keeps up."""
    low, high = 1.0, most
    if output_len * rate > at(most).output_tokens_per_second:
        return most, False
    for _ in range(_LITTLE_ROUNDS):
        middle = math.sqrt(low * high)
        if at(middle).output_tokens_per_second >= output_len * rate:
            high = middle
        else:
            low = middle
    return high, True
