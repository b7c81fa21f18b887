"""How fast a layout is under a demanded load."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import cast

from shardline.checkpoints.quantization import usual_rules
from shardline.deployment.deployment import Deployment
from shardline.models.communication import Exchange
from shardline.models.partition import Span
from shardline.models.step_work import StepWork, attention_work, step_work
from shardline.models.stored_weights import StoredRules, StoredWeights
from shardline.planner import vllm
from shardline.planner.cluster import Cluster
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import Fit, held_weights, kv_dtype
from shardline.planner.planned_model import PlannedModel
from shardline.planner.timing import Interval, Latency, Load, LoopSteps, Timing, by_little, loop_latency, loop_steps

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
    other_seconds: float
    """Time of a decode step without its exchanges."""
    is_sustained: bool
    """Whether the layout keeps up with the demanded rate."""

    @property
    def link_bytes_per_second(self) -> float:
        """Rate at which the exchanged bytes alone would take as long as the rest of the step."""
        return self.exchange_bytes / self.other_seconds


def layout_work(model: PlannedModel, layout: Layout, fitted: Fit) -> StepWork:
    """The work of the rank that has the most."""
    if fitted.deployment is not None:
        return deployment_work(fitted.deployment)
    same = dataclasses.replace(layout, kv="auto", data=layout.data if layout.whole_experts else 1)
    work, stage = _plain_work(model, same, tuple(fitted.stages))
    if layout.kv != "auto":
        kv, expands = kv_dtype(layout, model.spec), layout.engine != "shardline"
        attention = attention_work(model.spec, stage, layout.tensor, kv, expands=expands, context=layout.context)
        work = dataclasses.replace(work, attention=attention)
    return work


def deployment_work(deployment: Deployment) -> StepWork:
    """The work of the rank with the most weights."""
    label, _, _ = deployment.weight_format.name.partition("_")  # int8_fast has the bytes of int8
    rules = usual_rules().get(label, StoredRules())
    sizes = [rank.loaded_bytes for rank in deployment.weights]
    work = step_work(
        deployment.spec,
        deployment.grid.place(max(range(len(sizes)), key=sizes.__getitem__)),
        deployment.stages,
        StoredWeights(rules, deployment.dtype, lambda name: name),
        deployment.cache.dtype,
        "exact" if deployment.numerics == "exact" else "fast",
        whole_experts=deployment.expert_parallel,
    )
    if deployment.offload.expert_layers:
        layer = max(rank.expert_layer_bytes for rank in deployment.weights)
        return dataclasses.replace(work, streamed_expert_bytes=deployment.file_bytes, expert_layer_bytes=layer)
    return dataclasses.replace(work, streamed_bytes=deployment.file_bytes)


@functools.lru_cache(maxsize=512)
def _plain_work(model: PlannedModel, layout: Layout, stages: tuple[Span, ...]) -> tuple[StepWork, Span]:
    """(work, stage) of the rank that has the most, with a KV cache in 16 bits."""
    stored = held_weights(model, layout)
    grid = vllm.grid_of(layout)
    places = [grid.place(rank) for rank in range(0, grid.replica_size, grid.sharing)]
    place = max(places, key=lambda place: stages[place.pp_rank].size)
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
    by_memory = max(1.0, fitted.concurrency * fitted.max_model_len / per_request / layout.data)
    max_num_seqs, chunk = step_limits(layout, demand)
    if fitted.deployment is not None:
        limits = fitted.deployment.limits
        max_num_seqs, chunk = limits.max_num_seqs, limits.max_num_batched_tokens
    most = min(by_memory, max_num_seqs)

    is_full = demand.rate is None and demand.running is None

    arrivals = demand.rate / layout.data if demand.rate is not None and demand.running is None else 0.0

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
        seconds * (1 - share),
        sustained,
    )
