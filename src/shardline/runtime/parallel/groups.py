"""The groups of one rank, joined over the configured transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shardline.config.topology import RankGrid, RankPlace
from shardline.runtime.backends.base import Backend, Kernels
from shardline.runtime.parallel.collectives import Collectives, SingleRank, StageLink
from shardline.segment.expert_load import Counts
from shardline.segment.layout import SegmentLayout
from shardline.segment.progress import ProgressBoard, ProgressLine


@dataclass(frozen=True)
class RankGroups:
    """A rank's place in the grid and its connections to the other ranks."""

    place: RankPlace
    tensor: Collectives
    experts: Collectives
    """The ranks of the stage over which whole experts are distributed: those of `tensor`, or of all replicas in
    lockstep."""
    from_previous: StageLink | None
    to_next: StageLink | None
    progress: ProgressLine
    expert_load: Counts
    """[num_layers, num_experts]: this rank's token counts."""
    kv_pool: memoryview | None = None
    """Memory for the KV pool that all ranks of the TP group map; None: each has a pool of its own."""


def join_shared(kernels: Kernels, segment: memoryview, layout: SegmentLayout, rank: int, timeout: float) -> RankGroups:
    """Groups over a segment that all ranks of the replica map (see SegmentLayout)."""
    from shardline.runtime.parallel.shared_memory import SharedCollectives, SharedLink

    grid = layout.grid
    place = grid.place(rank)
    progress = ProgressBoard(layout.progress(segment), grid).line(rank)
    tensor: Collectives = SingleRank()
    if grid.tensor > 1:
        tensor = SharedCollectives(kernels, layout.group(segment, rank), place.tp_rank, grid.tensor, timeout, progress)
    experts = tensor
    if grid.data > 1:
        area, peers = layout.expert_group(segment, rank), place.ep_peers
        experts = SharedCollectives(kernels, area, peers.index(rank), len(peers), timeout, progress)

    def link(sender: int) -> StageLink:
        return SharedLink(layout.link(segment, sender), timeout, progress)

    return RankGroups(
        place=place,
        tensor=tensor,
        experts=experts,
        from_previous=None if place.previous_stage is None else link(place.previous_stage),
        to_next=None if place.next_stage is None else link(rank),
        progress=progress,
        expert_load=layout.expert_load(segment).of_rank(rank),
        kv_pool=layout.kv_pool(segment, place),
    )


def join_distributed(
    backend: Backend,
    transport: str,
    store_path: Path,
    segment: memoryview,
    layout: SegmentLayout,
    rank: int,
    timeout: float,
    *,
    tries_symmetric_memory: bool = False,
) -> RankGroups:
    """Groups over torch.distributed (`transport` "nccl": between GPUs, "gloo": through host memory); the segment only
    carries the progress board, the expert load and a shared KV pool."""
    from shardline.runtime.parallel.distributed import (
        DistributedCollectives,
        DistributedLink,
        join_world,
        rank_group,
    )

    grid = layout.grid
    place = grid.place(rank)
    progress = ProgressBoard(layout.progress(segment), grid).line(rank)
    # gloo moves host memory, so GPU tensors are copied to the host and back. That is a test mode.
    transit = torch.device("cpu") if transport == "gloo" else backend.device
    join_world(transport, store_path, rank, grid, timeout)
    places = [grid.place(other) for other in range(grid.world_size)]

    def group_of(peers_of: list[tuple[int, ...]]) -> Collectives:
        group = rank_group(transport, peers_of, rank, timeout)
        small_gather = backend.make_small_gather(group, timeout) if tries_symmetric_memory else None
        kernels, is_capturable = backend.kernels, transport == "nccl"
        return DistributedCollectives(kernels, group, transit, progress, small_gather, is_capturable=is_capturable)

    tensor = group_of([other.tp_peers for other in places]) if grid.tensor > 1 else SingleRank()
    experts = group_of([other.ep_peers for other in places]) if grid.data > 1 else tensor
    previous, following = place.previous_stage, place.next_stage
    return RankGroups(
        place=place,
        tensor=tensor,
        experts=experts,
        from_previous=None if previous is None else DistributedLink(previous, backend.device, transit, progress),
        to_next=None if following is None else DistributedLink(following, backend.device, transit, progress),
        progress=progress,
        expert_load=layout.expert_load(segment).of_rank(rank),
        kv_pool=layout.kv_pool(segment, place),
    )


def join_nobody(num_layers: int = 0, num_experts: int = 0) -> RankGroups:
    """The groups of a replica of one rank, with token counts of shape [num_layers, num_experts]."""
    grid = RankGrid(tensor=1, pipeline=1)
    board = ProgressBoard(memoryview(bytearray(ProgressBoard.num_bytes(1))), grid)
    load = np.zeros((num_layers, num_experts), dtype=np.int64)
    single = SingleRank()
    return RankGroups(grid.place(0), single, single, None, None, board.line(0), load)
