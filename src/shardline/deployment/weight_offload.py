"""Which weights are read from files, or copied to a GPU from host memory, because a rank's memory cannot hold all of
them: layers in every step, or, of models with experts, those experts that tokens choose."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import msgspec

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes, parse_bytes
from shardline.config.topology import RankPlace
from shardline.deployment.deployment import LAYER_SLOTS, NO_OFFLOAD, OffloadPlan, RankWeights
from shardline.deployment.kv_budget import gpu_left
from shardline.deployment.layout import Layout
from shardline.deployment.machine import Machine
from shardline.models.partition import Span

LayerBytes = Callable[[RankPlace, int, bool], int]
"""The bytes of a layer's weights on the rank at a place, or, if the last argument says so, of its experts."""

_PROCESS_BYTES = 192 << 20
"""What a rank's process has in memory beside weights, keys and values, and activations."""
_KV_SHARE = 0.25
"""Of the free memory, what is left for the KV cache if its size is not set."""
_HOST_SHARE = 0.8
"""Of a host's free memory, what weights for its GPUs may have: programs and the page cache need memory too."""


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
        # Layers that are read have memory too, and so has what passes through a CPU's on its way.
        num_layers = LAYER_SLOTS * (1 + _copies_on_cpu(layout)) * (not has_experts)
        num_layers += has_experts and _copies_on_cpu(layout)
        wanted += num_layers * max(
            layer_bytes(place, layer, has_experts)
            for place in map(layout.grid.place, range(layout.grid.world_size))
            for layer in range(stages[place.pp_rank].start, stages[place.pp_rank].stop)
        )
    plan = _plan_experts if has_experts else _plan_layers
    rooms, folder = _host_rooms(config, layout, machine), model.offload_to or ""
    try:
        offload, left = plan(folder, wanted, layout, stages, weights, layer_bytes, rooms)
    except _NothingSaved as error:
        fewer = "use fewer pipeline stages, or " if config.parallel.pipeline_parallel_size > 1 else ""
        raise ValueError(f"{asked} would save nothing: {error}; {error.instead or fewer + instead}") from None
    if not folder:
        _check_host_memory(layout, machine, left, rooms)
    return offload, left


def passage_bytes(layout: Layout, offload: OffloadPlan, weights: Sequence[RankWeights]) -> tuple[int, ...]:
    """For each rank, the memory through which weights of files pass to a device that is the CPU; empty: none do."""
    if not offload.folder or not _copies_on_cpu(layout):
        return ()
    return tuple(rank.expert_layer_bytes or LAYER_SLOTS * rank.slot_bytes for rank in weights)


def _copies_on_cpu(layout: Layout) -> bool:
    return layout.device == "cpu" and layout.kernels == "torch"


class _NothingSaved(Exception):
    """Why what is read would need as much memory as what stays."""

    def __init__(self, why: str, instead: str = "") -> None:
        super().__init__(why)
        self.instead = instead
        """What to give; empty: no other number helps."""


def _missing_bytes(
    config: EngineConfig, layout: Layout, machine: Machine, activations: int, weights: Sequence[RankWeights]
) -> int:
    """The most bytes of a rank's weights for which its memory has no room."""
    missing, cache = [], config.cache
    for index in layout.hosts:
        ranks = [rank for _, rank in layout.ranks_on(index)]
        held, beside = [weights[rank].num_bytes for rank in ranks], activations
        if layout.device == "cpu":
            room = machine.hosts[index].free_memory / len(ranks)
            needed, beside = sum(held) / len(held), beside + _PROCESS_BYTES
        else:
            gpus = layout.devices_on(index, machine)
            room = gpu_left(gpus, len(ranks), cache.gpu_memory_utilization, 0, 0)
            needed = max(held)  # the largest rank may be on the smallest GPU
        pages = room * _KV_SHARE if cache.kv_cache_memory is None else parse_bytes(cache.kv_cache_memory)
        missing.append(needed + pages + beside - room)
    return math.ceil(max(missing))


def _host_rooms(config: EngineConfig, layout: Layout, machine: Machine) -> list[int]:
    """For each rank, the bytes of host memory from which its device may copy weights."""
    rooms = [0 if layout.device == "cpu" else sys.maxsize] * layout.grid.world_size
    for index in layout.hosts:
        on_host = layout.ranks_on(index)
        blocks = config.cache.offloading_bytes * len(on_host) / layout.grid.replica_size
        free = machine.hosts[index].free_memory * _HOST_SHARE - blocks
        for _, rank in on_host:
            rooms[rank] = min(rooms[rank], max(0, int(free / len(on_host)) - _PROCESS_BYTES))
    return rooms


def _check_host_memory(layout: Layout, machine: Machine, weights: Sequence[RankWeights], rooms: Sequence[int]) -> None:
    for index in layout.hosts:
        ranks = [rank for _, rank in layout.ranks_on(index)]
        if any(weights[rank].host_bytes > rooms[rank] for rank in ranks):
            raise ValueError(
                f"{machine.hosts[index].name} needs {format_bytes(sum(weights[rank].host_bytes for rank in ranks))} of "
                f"memory for the weights that do not stay on its GPUs, and has "
                f"{format_bytes(sum(rooms[rank] for rank in ranks))} for them: lower cpu_offload_gb, or name a folder "
                "on a fast disk for the rest: --offload-to"
            )


def _plan_experts(
    folder: str,
    wanted: int,
    layout: Layout,
    stages: Sequence[Span],
    weights: Sequence[RankWeights],
    layer_bytes: LayerBytes,
    rooms: Sequence[int],
) -> tuple[OffloadPlan, tuple[RankWeights, ...]]:
    """Of the experts, all but `wanted` bytes stay in memory, and at least those of one layer: a step may need all. On a
    device, where experts take the places of others as large as they, at least those of one layer of each size; and all
    have a place in host memory too, or in the files behind it."""
    layers: set[int] = set()
    left = []
    for rank, held in enumerate(weights):
        place = layout.grid.place(rank)
        span = stages[place.pp_rank]
        sizes = {layer: layer_bytes(place, layer, True) for layer in range(span.start, span.stop)}
        total, most = sum(sizes.values()), max(sizes.values())
        read = min(wanted, total - (sum(set(sizes.values())) if layout.kernels == "torch" else most))
        if read > 0:
            layers |= {layer for layer, size in sizes.items() if size}
            held = msgspec.structs.replace(
                held,
                num_bytes=held.num_bytes - read,
                touched_bytes=0,
                read_bytes=read,
                kept_expert_bytes=total - read,
                expert_layer_bytes=most,
                host_bytes=total,
            )
        left.append(held)
    if not layers:
        raise _NothingSaved(
            "no rank has experts of more than one layer, and all experts of a layer must fit into memory"
        )
    if all(held.host_bytes <= room for held, room in zip(left, rooms, strict=True)):
        folder = ""
    elif folder:
        left = [
            msgspec.structs.replace(held, host_bytes=min(held.host_bytes, room))
            for held, room in zip(left, rooms, strict=True)
        ]
    return OffloadPlan(folder, expert_layers=tuple(sorted(layers))), tuple(left)


def _plan_layers(
    folder: str,
    wanted: int,
    layout: Layout,
    stages: Sequence[Span],
    weights: Sequence[RankWeights],
    layer_bytes: LayerBytes,
    rooms: Sequence[int],
) -> tuple[OffloadPlan, tuple[RankWeights, ...]]:
    """Layers of `wanted` bytes or more, of each stage as many, are read in every step."""
    layers: list[int] = []
    host_layers: list[int] = []
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
        # Evenly between those that stay, which compute while the next one is read; files between host memory likewise.
        chosen = [span.start + index for index in _spread(count, span.size)]
        most_on_host = min(rooms[place.rank] for place in places) // max(sizes) if folder else count
        if most_on_host < count:
            most_on_host = max(0, most_on_host - LAYER_SLOTS)  # those that are read from files pass through memory
        on_host = {chosen[index] for index in _spread(min(count, most_on_host), count)}
        layers += chosen
        host_layers += sorted(on_host)
    left = []
    for rank, held in enumerate(weights):
        place = layout.grid.place(rank)
        span = stages[place.pp_rank]
        read, copied = (
            [layer_bytes(place, layer, False) for layer in some if span.start <= layer < span.stop]
            for some in (layers, host_layers)
        )
        left.append(
            msgspec.structs.replace(
                held,
                num_bytes=held.num_bytes - sum(read) + LAYER_SLOTS * max(read),
                touched_bytes=0,
                read_bytes=sum(read),
                slot_bytes=max(read),
                host_bytes=sum(copied),
            )
        )
    is_in_files = len(host_layers) < len(layers)
    return OffloadPlan(folder if is_in_files else "", tuple(layers), host_layers=tuple(host_layers)), tuple(left)


def _spread(count: int, size: int) -> list[int]:
    """`count` of the indices below `size`, evenly between the others."""
    return [index for index in range(size) if (index + 1) * count // size > index * count // size]


def _check(config: EngineConfig, layout: Layout) -> None:
    if layout.device != "cpu" and layout.kernels != "torch":
        raise ValueError(
            "weights stay on GPUs with all kernels but torch's so far: give --kernels torch, or split the model over "
            "more GPUs (--tensor-parallel-size, --pipeline-parallel-size), or use a smaller --quantization"
        )
    if layout.device == "mps":
        raise ValueError("cpu_offload_gb and offload_to save nothing here: the GPU's memory is the host's")
    if layout.device == "cpu" and config.model.offload_to is None:
        raise ValueError(
            "cpu_offload_gb needs offload_to on a CPU, whose memory holds the weights already: a folder on a fast disk "
            "with room for them"
        )
    if config.parallel.enable_eplb:
        raise ValueError(
            "experts that do not stay in memory cannot move between ranks: leave out enable_eplb, or cpu_offload_gb "
            "and offload_to"
        )
