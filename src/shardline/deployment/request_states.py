"""Models whose layers keep a state for each request: what they need of options and memory; all else is refused before
anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes, parse_bytes
from shardline.deployment.deployment import RankWeights
from shardline.deployment.kv_budget import gpu_left
from shardline.deployment.layout import Layout
from shardline.deployment.machine import Machine
from shardline.models.partition import Span
from shardline.models.parts import DType
from shardline.models.sizes import state_bytes, state_step_bytes, step_bytes
from shardline.models.spec import DecoderSpec


def config_for_states(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """The configuration without a prefix cache if the model keeps states: nothing holds the state behind a prefix.

    Raises:
        ValueError: an option needs the prefix cache.
    """
    if not spec.keeps_states:
        return config
    try:
        return replace(config, cache=replace(config.cache, enable_prefix_caching=False))
    except ValueError as error:
        told = str(error).partition(", which")[0]
        raise ValueError(
            f"{told}, and {spec.model_type}, whose layers keep a state for each request, has none: leave it out"
        ) from None


def plan_states(
    config: EngineConfig,
    layout: Layout,
    machine: Machine,
    spec: DecoderSpec,
    stages: Sequence[Span],
    dtype: DType,
    weights: Sequence[RankWeights],
) -> tuple[int, ...]:
    """The bytes of states on each rank, for as many requests as may run at once; empty: the model keeps none.
    `weights`: all else that ranks hold, without the KV cache.

    Raises:
        ValueError: memory has room for the weights, but not for them.
    """
    if not spec.keeps_states:
        return ()
    most, places = config.scheduler.max_num_seqs, map(layout.grid.place, range(layout.grid.world_size))
    tokens = config.scheduler.max_num_batched_tokens
    activations = step_bytes(spec, dtype, tokens, most) + state_step_bytes(spec, tokens, 0)
    keys = None if config.cache.kv_cache_memory is None else parse_bytes(config.cache.kv_cache_memory)
    each = [state_bytes(spec, place, stages, dtype) for place in places]
    for index in layout.hosts:
        ranks = [rank for _, rank in layout.ranks_on(index)]
        if layout.device == "cpu":
            left = machine.hosts[index].free_memory - sum(weights[rank].num_bytes for rank in ranks)
            of_request, where = sum(each[rank] for rank in ranks), machine.hosts[index].name
            left -= left // 2 if keys is None else keys * len(ranks)
        else:
            gpus, share = layout.devices_on(index, machine), config.cache.gpu_memory_utilization
            held = max(weights[rank].num_bytes for rank in ranks)
            of_request, where = max(each[rank] for rank in ranks), "a GPU"
            if keys is None:
                of_request += state_step_bytes(spec, 0, 1)  # a step copies them
                left = gpu_left(gpus, len(ranks), share, held, activations)
                left -= left // 8  # some of it for keys and values
            else:
                left = min(gpu.memory_total for gpu in gpus) // -(-len(ranks) // len(gpus)) - held - keys
        if 0 <= left < most * of_request:
            fits = left // of_request
            raise ValueError(
                f"the states of {most} requests need {format_bytes(most * of_request)}, and {where} has "
                f"{format_bytes(left)} for them beside weights, keys and values; "
                + (f"lower --max-num-seqs to {fits} or less" if fits else "use more memory")
            )
        if left < 0:
            return ()  # the refusal is about weights
    return tuple(most * size for size in each)
