"""The groups one rank belongs to, joined over the transport that the configuration chose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shardline.config.topology import RankGrid, RankPlace
from shardline.runtime.parallel.collectives import Collectives, SingleRank, StageLink
from shardline.runtime.parallel.progress import ProgressBoard, ProgressLine
from shardline.runtime.parallel.segment import SegmentLayout


@dataclass(frozen=True)
class RankGroups:
    """A rank's place in the grid and its ways to the other ranks."""

    place: RankPlace
    tensor: Collectives
    from_previous: StageLink | None
    to_next: StageLink | None
    progress: ProgressLine


def join_shared(segment: memoryview, grid: RankGrid, rank: int, timeout: float) -> RankGroups:
    """Groups over a segment that all ranks of the replica map (see SegmentLayout)."""
    from shardline.runtime.parallel.shared_memory import SharedCollectives, SharedLink

    layout = SegmentLayout(grid)
    place = grid.place(rank)
    progress = ProgressBoard(layout.progress(segment), grid).line(rank)
    tensor: Collectives = SingleRank()
    if grid.tensor > 1:
        tensor = SharedCollectives(layout.group(segment, rank), place.tp_rank, grid.tensor, timeout, progress)

    def link(sender: int) -> StageLink:
        return SharedLink(layout.link(segment, sender), timeout, progress)

    return RankGroups(
        place=place,
        tensor=tensor,
        from_previous=None if place.previous_stage is None else link(place.previous_stage),
        to_next=None if place.next_stage is None else link(rank),
        progress=progress,
    )


def join_distributed(
    backend: str, device: torch.device, store_path: Path, segment: memoryview, grid: RankGrid, rank: int, timeout: float
) -> RankGroups:
    """Groups over torch.distributed ("gloo", or "nccl" for tensors on GPUs); the segment only carries the progress
    board."""
    from shardline.runtime.parallel.distributed import (
        DistributedCollectives,
        DistributedLink,
        join_world,
        tensor_group,
    )

    place = grid.place(rank)
    progress = ProgressBoard(SegmentLayout(grid).progress(segment), grid).line(rank)
    join_world(backend, store_path, rank, grid, timeout)
    tensor: Collectives = SingleRank()
    if grid.tensor > 1:
        tensor = DistributedCollectives(tensor_group(backend, grid, rank, timeout), progress)
    previous, following = place.previous_stage, place.next_stage
    return RankGroups(
        place=place,
        tensor=tensor,
        from_previous=None if previous is None else DistributedLink(previous, device, progress),
        to_next=None if following is None else DistributedLink(following, device, progress),
        progress=progress,
    )


def alone() -> RankGroups:
    """The groups of a replica of one rank."""
    grid = RankGrid(tensor=1, pipeline=1)
    board = ProgressBoard(memoryview(bytearray(ProgressBoard.num_bytes(1))), grid)
    return RankGroups(grid.place(0), SingleRank(), None, None, board.line(0))
