"""Models whose layers keep a state for each request: what they need of options and memory; all else is refused before
anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes
from shardline.deployment.deployment import RankWeights
from shardline.deployment.layout import Layout
from shardline.deployment.machine import Machine
from shardline.models.partition import Span
from shardline.models.parts import DType
from shardline.models.sizes import state_bytes
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
        raise ValueError(f"{error} for {spec.model_type}, whose layers keep a state for each request") from None


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

    Raises:
        ValueError: a host's memory has no room for them.
    """
    if not spec.keeps_states:
        return ()
    most, places = config.scheduler.max_num_seqs, map(layout.grid.place, range(layout.grid.world_size))
    each = [state_bytes(spec, place, stages, dtype) for place in places]
    for index in layout.hosts if layout.device == "cpu" else ():
        ranks, free = [rank for _, rank in layout.ranks_on(index)], machine.hosts[index].free_memory
        held, of_request = sum(weights[rank].num_bytes for rank in ranks), sum(each[rank] for rank in ranks)
        # Half of what is left is for keys and values.
        if held <= free < held + 2 * most * of_request:
            fits = (free - held) // (2 * of_request)
            raise ValueError(
                f"the states of {most} requests need {format_bytes(most * of_request)} beside weights of "
                f"{format_bytes(held)}, and {machine.hosts[index].name} has {format_bytes(free)} available; "
                + (f"lower --max-num-seqs to {fits}" if fits else "use a machine with more memory")
            )
    return tuple(most * size for size in each)
