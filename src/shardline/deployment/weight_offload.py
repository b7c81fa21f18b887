"""Which weights are read from files, because a rank's memory cannot hold all of them: layers in every step,
or, of models with experts, those experts that tokens choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes, parse_bytes
from shardline.config.topology import RankPlace
from shardline.deployment.deployment import LAYER_SLOTS, NO_OFFLOAD, OffloadPlan, RankWeights
from shardline.deployment.layout import Layout
from shardline.deployment.machine import Machine
from shardline.models.partition import Span

LayerBytes = Callable[[RankPlace, int, bool], int]
"""The bytes of a layer's weights on the rank at a place, or, if the last argument says so, of its experts."""

_PROCESS_BYTES = 192 << 20
"""What a rank's process has in memory beside weights, keys and values, and activations."""
_KV_SHARE = 0.25
"""Of the free memory, what is left for the KV cache if its size is not set."""


def plan_offload(
    config: EngineConfig,
    layout: Layout,
    machine: Machine,
    activations: int,
    stages: Sequence[Span],
    weights: Sequence[RankWeights],
    layer_bytes: LayerBytes,
    has_experts: bool,
) -> tuple[OffloadPlan, tuple[RankWeights, ...]]:
    """The weights that are read from files, and the memory that the ranks' weights need then. `activations`: the
    bytes of a rank's step.

    Raises:
        ValueError: the deployment cannot do so, or it would save nothing.
    """
    model = config.model
    if not model.cpu_offload_gb and model.offload_to is None:
        return NO_OFFLOAD, tuple(weights)
    _check(config, layout)
    wanted = int(model.cpu_offload_gb * (1 << 30))
    asked, instead = f"cpu_offload_gb {model.cpu_offload_gb:g}", "leave it out"
    if not wanted:
        wanted = _missing_bytes(config, layout, machine, activations, weights)
        if wanted <= 0:
            return NO_OFFLOAD, tuple(weights)
        asked = f"offload_to, for the {format_bytes(wanted)} of each rank that memory has no room for,"
        smaller = "set kv_cache_memory (a quarter of memory is left for it)"
        if config.cache.kv_cache_memory is not None:
            smaller = "use a smaller kv_cache_memory"
        instead = f"use a smaller quantization or model, or {smaller}"
        if not has_experts:  # layers that are read have memory too
            wanted += LAYER_SLOTS * max(
                layer_bytes(place, layer, False)
                for place in map(layout.grid.place, range(layout.grid.world_size))
                for layer in range(stages[place.pp_rank].start, stages[place.pp_rank].stop)
            )
    plan = _plan_experts if has_experts else _plan_layers
    try:
        return plan(str(model.offload_to), wanted, layout, stages, weights, layer_bytes)
    except _NothingSaved as error:
        fewer = "use fewer pipeline stages, or " if config.parallel.pipeline_parallel_size > 1 else ""
        raise ValueError(f"{asked} would save nothing: {error}; {error.instead or fewer + instead}") from None


class _NothingSaved(Exception):
    """Why what is read would need as much memory as what stays."""

    def __init__(self, why: str, instead: str = "") -> None:
        super().__init__(why)
        self.instead = instead
        """What to give; empty: no other number helps."""


def _missing_bytes(
    config: EngineConfig, layout: Layout, machine: Machine, activations: int, weights: Sequence[RankWeights]
) -> int:
    """The most bytes of a rank's weights for which its host has no memory."""
    missing = []
    for index in layout.hosts:
        ranks, free = [rank for _, rank in layout.ranks_on(index)], machine.hosts[index].free_memory
        kept = config.cache.kv_cache_memory
        beside = free * _KV_SHARE if kept is None else len(ranks) * parse_bytes(kept)
        beside += len(ranks) * (activations + _PROCESS_BYTES)
        missing.append((sum(weights[rank].num_bytes for rank in ranks) + beside - free) / len(ranks))
    return math.ceil(max(missing))


def _plan_experts(
    folder: str,
    wanted: int,
    layout: Layout,
    stages: Sequence[Span],
    weights: Sequence[RankWeights],
    layer_bytes: LayerBytes,
) -> tuple[OffloadPlan, tuple[RankWeights, ...]]:
    """Of the experts, all but `wanted` bytes stay in memory, and at least those of one layer: a step may need all."""
    layers: set[int] = set()
    left = []
    for rank, held in enumerate(weights):
        place = layout.grid.place(rank)
        span = stages[place.pp_rank]
        sizes = {layer: layer_bytes(place, layer, True) for layer in range(span.start, span.stop)}
        total, most = sum(sizes.values()), max(sizes.values())
        read = min(wanted, total - most)
        if read > 0:
            layers |= {layer for layer, size in sizes.items() if size}
            held = msgspec.structs.replace(
                held,
                num_bytes=held.num_bytes - read,
                touched_bytes=0,
                read_bytes=read,
                kept_expert_bytes=total - read,
                expert_layer_bytes=most,
            )
        left.append(held)
    if not layers:
        raise _NothingSaved(
            "no rank has experts of more than one layer, and all experts of a layer must fit into memory"
        )
    return OffloadPlan(folder, expert_layers=tuple(sorted(layers))), tuple(left)


def _plan_layers(
    folder: str,
    wanted: int,
    layout: Layout,
    stages: Sequence[Span],
    weights: Sequence[RankWeights],
    layer_bytes: LayerBytes,
) -> tuple[OffloadPlan, tuple[RankWeights, ...]]:
    """Layers of `wanted` bytes or more, of each stage as many, are read in every step."""
    layers: list[int] = []
    for stage, span in enumerate(stages):
        places = [place for place in map(layout.grid.place, range(layout.grid.world_size)) if place.pp_rank == stage]
        sizes = [max(layer_bytes(place, layer, False) for place in places) for layer in range(span.start, span.stop)]
        count = next((count for count in range(1, span.size) if sum(sorted(sizes)[:count]) >= wanted), span.size)
        if span.size <= LAYER_SLOTS:
            raise _NothingSaved(f"{LAYER_SLOTS} layers that are read always have memory, and a stage has {span.size}")
        if count <= LAYER_SLOTS:
            raise _NothingSaved(
                f"it is {count} of the {span.size} layers of a stage, and {LAYER_SLOTS} of those that are read always "
                "have memory",
                f"give more than {format_bytes(sum(sorted(sizes)[:LAYER_SLOTS]))}",
            )
        # Evenly between those that stay, which compute while the next one is read.
        layers += [
            span.start + index
            for index in range(span.size)
            if (index + 1) * count // span.size > index * count // span.size
        ]
    left = []
    for rank, held in enumerate(weights):
        place = layout.grid.place(rank)
        span = stages[place.pp_rank]
        read = [layer_bytes(place, layer, False) for layer in layers if span.start <= layer < span.stop]
        left.append(
            msgspec.structs.replace(
                held,
                num_bytes=held.num_bytes - sum(read) + LAYER_SLOTS * max(read),
                touched_bytes=0,
                read_bytes=sum(read),
                slot_bytes=max(read),
            )
        )
    return OffloadPlan(folder, tuple(layers)), tuple(left)


def _check(config: EngineConfig, layout: Layout) -> None:
    if layout.device != "cpu" or layout.kernels != "own":
        instead = "leave out --kernels torch"
        if layout.device != "cpu":
            instead = (
                "on GPUs, split the model over more of them (--tensor-parallel-size, --pipeline-parallel-size), or use "
                "a smaller --quantization"
            )
        raise ValueError(f"weights are read from a disk with the CPU's own kernels only so far: {instead}")
    if config.model.offload_to is None:
        raise ValueError(
            "cpu_offload_gb needs offload_to on a CPU, whose memory holds the weights already: a folder on a fast disk "
            "with room for them"
        )
    if config.parallel.enable_eplb:
        raise ValueError("offload_to reads weights from files, and enable_eplb changes them: leave one of them out")
