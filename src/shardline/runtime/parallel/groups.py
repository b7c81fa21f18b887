"""The groups of one rank, joined over the configured transport."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from shardline.config.topology import Axis, RankGrid, RankPlace
from shardline.kernels.contract import ComputeDevice, Kernels
from shardline.runtime.parallel.collectives import Collectives, SingleRank, SmallGather, StageLink
from shardline.runtime.parallel.exchange import Mailbox, SharedGroup, SocketGroup, SocketLink
from shardline.runtime.parallel.host_link import HostLink
from shardline.runtime.parallel.host_memory import HostCollectives
from shardline.runtime.parallel.rendezvous import Meeting, connect_ranks
from shardline.segment.expert_load import Counts
from shardline.segment.layout import SegmentLayout
from shardline.segment.progress import ProgressBoard, ProgressLine

MakeSmallGather = Callable[[object, float], "SmallGather | None"]
"""A torch.distributed group and a time-out in seconds -> what gathers few bytes in it; see `Backend`."""


@dataclass(frozen=True)
class RankGroups:
    """A rank's place in the grid and its connections to the other ranks."""

    place: RankPlace
    collectives: Mapping[Axis, Collectives]
    """The exchanges of this rank's group on each axis. Groups of the same ranks share theirs."""
    from_previous: StageLink | None
    to_next: StageLink | None
    progress: ProgressLine
    expert_load: Counts
    """[num_layers, num_experts]: this rank's token counts."""
    kv_pool: memoryview | None = None
    """Memory for the KV pool that all ranks of the TP group map; None: each has a pool of its own."""

    def __getitem__(self, axis: Axis) -> Collectives:
        return self.collectives[axis]

    def abort(self) -> None:
        """End all exchanges of host memory with an error, on every rank that waits in one. Any thread may call this."""
        for one in (*self.collectives.values(), self.from_previous, self.to_next):
            if isinstance(one, (HostCollectives, HostLink)):
                one.abort()


def connect_host_memory(
    kernels: Kernels,
    segment: memoryview,
    layout: SegmentLayout,
    rank: int,
    timeout: float,
    meeting: Meeting | None = None,
) -> RankGroups:
    """Groups that exchange host memory: through the segment of this host, or over sockets if they reach other hosts.

    `timeout`: seconds that an exchange may take; `meeting`: where to meet the ranks of other hosts, if there are any.

    Raises:
        TimeoutError: ranks of other hosts did not connect in time. The message names them.
    """
    grid = layout.grid
    place = grid.place(rank)
    progress = layout.progress(segment).line(rank)
    joined = _joined(segment, layout, place)
    remote = {name: ranks for name, (ranks, area) in joined.items() if area is None}
    assert meeting is not None or not remote, "ranks of several hosts need a place to meet"
    sockets = connect_ranks(meeting, rank, remote) if meeting is not None and remote else {}

    def group(name: Axis) -> Collectives:
        ranks, area = joined[name]
        if area is not None:
            shared = SharedGroup(area, ranks.index(rank), len(ranks), progress=progress.exchanges)
            return HostCollectives(kernels, shared, timeout)
        names = [_peer_name(grid, sockets[name].get(peer), peer) for peer in ranks]
        fds = [-1 if peer == rank else sockets[name][peer].detach() for peer in ranks]
        return HostCollectives(
            kernels, SocketGroup(fds, ranks.index(rank), names, progress=progress.exchanges), timeout
        )

    def link(sender: int, receiver: int) -> StageLink:
        name = _link_name(sender, receiver)
        _, area = joined[name]
        if area is not None:
            return HostLink(Mailbox(area), timeout, progress)
        [(peer, connection)] = sockets[name].items()
        name = _peer_name(grid, connection, peer)
        return HostLink(SocketLink(connection.detach(), name), timeout, progress)

    return RankGroups(
        place=place,
        collectives=_join_groups(place, group),
        from_previous=None if place.previous_stage is None else link(place.previous_stage, rank),
        to_next=None if place.next_stage is None else link(rank, place.next_stage),
        progress=progress,
        expert_load=layout.expert_load(segment).of_rank(rank),
        kv_pool=layout.kv_pool(segment, place),
    )


def _join_groups(place: RankPlace, join: Callable[[Axis], Collectives]) -> dict[Axis, Collectives]:
    """The exchanges on every axis; `join` joins the group of an axis."""
    by_peers: dict[tuple[int, ...], Collectives] = {(place.rank,): SingleRank()}
    by_peers |= {peers: join(axis) for axis, peers in place.distinct_groups().items()}
    return {axis: by_peers[peers] for axis, peers in place.groups.items()}


def _joined(
    segment: memoryview, layout: SegmentLayout, place: RankPlace
) -> dict[str, tuple[tuple[int, ...], memoryview | None]]:
    """The ranks of each group and link of a rank, by its name, and its area in the segment; None: it needs sockets."""
    joined: dict[str, tuple[tuple[int, ...], memoryview | None]] = {
        axis: (peers, layout.group(segment, place, axis)) for axis, peers in place.distinct_groups().items()
    }
    for sender, receiver in ((place.previous_stage, place.rank), (place.rank, place.next_stage)):
        if sender is not None and receiver is not None:
            joined[_link_name(sender, receiver)] = (sender, receiver), layout.link(segment, sender)
    return joined


def _link_name(sender: int, receiver: int) -> str:
    return f"stage link {sender}-{receiver}"


def _peer_name(grid: RankGrid, connection: socket.socket | None, peer: int) -> str:
    """The name of another rank in errors."""
    return str(grid.place(peer)) if connection is None else f"{grid.place(peer)} at {connection.getpeername()[0]}"


def connect_distributed(
    backend: ComputeDevice,
    transport: str,
    store: Store,
    segment: memoryview,
    layout: SegmentLayout,
    rank: int,
    timeout: float,
    *,
    make_small_gather: MakeSmallGather | None = None,
) -> RankGroups:
    """Groups over torch.distributed (`transport` "nccl": between GPUs, "gloo": through host memory). Ranks find each
    other in `store`. The segment only carries the progress board, the expert load and a shared KV pool.
    `make_small_gather`: see `Backend`; None: torch.distributed gathers everything.

    Raises:
        TimeoutError, ConnectionError: ranks are missing.
    """
    from shardline.runtime.parallel.distributed import (
        DistributedCollectives,
        DistributedLink,
        join_world,
        rank_group,
    )

    grid = layout.grid
    place = grid.place(rank)
    progress = layout.progress(segment).line(rank)
    # gloo moves host memory, so GPU tensors are copied to the host and back. That is a test mode.
    transit = torch.device("cpu") if transport == "gloo" else backend.device
    join_world(transport, store, rank, grid, timeout)
    places = [grid.place(other) for other in range(grid.world_size)]

    def group(axis: Axis) -> Collectives:
        process_group = rank_group(transport, [other.peers(axis) for other in places], rank, timeout)
        small_gather = None if make_small_gather is None else make_small_gather(process_group, timeout)
        kernels, is_capturable = backend.kernels, transport == "nccl"
        return DistributedCollectives(
            kernels, process_group, transit, progress, small_gather, is_capturable=is_capturable
        )

    previous, following = place.previous_stage, place.next_stage
    return RankGroups(
        place=place,
        collectives=_join_groups(place, group),
        from_previous=None if previous is None else DistributedLink(previous, backend.device, transit, progress),
        to_next=None if following is None else DistributedLink(following, backend.device, transit, progress),
        progress=progress,
        expert_load=layout.expert_load(segment).of_rank(rank),
        kv_pool=layout.kv_pool(segment, place),
    )


def make_single_rank_groups(num_layers: int = 0, num_experts: int = 0) -> RankGroups:
    """The groups of a replica of one rank, with token counts of shape [num_layers, num_experts]."""
    grid = RankGrid(tensor=1, pipeline=1)
    board = ProgressBoard(memoryview(bytearray(ProgressBoard.num_bytes(1))), (0,))
    load = np.zeros((num_layers, num_experts), dtype=np.int64)
    single, place = SingleRank(), grid.place(0)
    return RankGroups(place, dict.fromkeys(place.groups, single), None, None, board.line(0), load)
