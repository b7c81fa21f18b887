"""Which layers' weights are read from files in every step, because a rank's memory cannot hold all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes
from shardline.config.topology import RankPlace
from shardline.deployment.deployment import LAYER_SLOTS, NO_OFFLOAD, OffloadPlan, RankWeights
from shardline.deployment.layout import Layout
from shardline.models.partition import Span

LayerBytes = Callable[[RankPlace, int], int]
"""The bytes of a layer's weights on the rank at a place."""


def plan_offload(
    config: EngineConfig,
    layout: Layout,
    stages: Sequence[Span],
    weights: Sequence[RankWeights],
    layer_bytes: LayerBytes,
) -> tuple[OffloadPlan, tuple[RankWeights, ...]]:
    """The layers that are read in every step, and the memory that the ranks' weights need then.

    Raises:
        ValueError: the deployment cannot do so, or it would save nothing.
    """
    model = config.model
    if not model.cpu_offload_gb:
        return NO_OFFLOAD, tuple(weights)
    _check(config, layout)
    wanted = int(model.cpu_offload_gb * (1 << 30))
    layers: list[int] = []
    for stage, span in enumerate(stages):
        places = [place for place in map(layout.grid.place, range(layout.grid.world_size)) if place.pp_rank == stage]
        sizes = [max(layer_bytes(place, layer) for place in places) for layer in range(span.start, span.stop)]
        count = next((count for count in range(1, span.size) if sum(sorted(sizes)[:count]) >= wanted), span.size)
        if count < span.size:
            count += count % LAYER_SLOTS  # the first layer of a step is read while the last of the one before computes
        if count <= LAYER_SLOTS:
            raise ValueError(
                f"cpu_offload_gb {model.cpu_offload_gb:g} is {count} of the {span.size} layers of a stage, and "
                f"{LAYER_SLOTS} of those that are read always have memory, so nothing would be saved: a layer has "
                f"{format_bytes(max(sizes))}"
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
        read = [layer_bytes(place, layer) for layer in layers if span.start <= layer < span.stop]
        left.append(
            msgspec.structs.replace(
                held,
                num_bytes=held.num_bytes - sum(read) + LAYER_SLOTS * max(read),
                touched_bytes=0,
                read_bytes=sum(read),
                slot_bytes=max(read),
            )
        )
    return OffloadPlan(str(model.offload_to), tuple(layers)), tuple(left)


def _check(config: EngineConfig, layout: Layout) -> None:
    if layout.device != "cpu" or layout.kernels != "own":
        raise ValueError(
            "cpu_offload_gb works with the CPU's own kernels only so far: on GPUs, split the model over more of them "
            "(--tensor-parallel-size, --pipeline-parallel-size), or use a smaller --quantization"
        )
    if config.model.offload_to is None:
        raise ValueError(
            "cpu_offload_gb needs offload_to on a CPU, whose memory holds the weights already: a folder on a fast disk "
            "with room for them"
        )
    if config.parallel.enable_eplb:
        raise ValueError("cpu_offload_gb reads weights from files, and enable_eplb changes them: leave one of them out")
