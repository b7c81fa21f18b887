"""The layout of the memory segment that the ranks of one engine on one host map. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardline.config.topology import Axis, RankGrid, RankPlace
from shardline.segment.expert_load import ExpertLoadBoard
from shardline.segment.progress import ProgressBoard

_GROUP_BYTES = 16 << 20
_LINK_BYTES = 4 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True)
class SegmentLayout:
    """The places of the parts of one segment. It holds only what ranks of one host share.

    The parts: a progress board and the expert load of these ranks; an area for each group and for each stage link, and
    a KV pool for each TP group that shares one. A group or
    link that reaches another host has no part in any segment.
    """

    grid: RankGrid
    ranks: tuple[int, ...]
    """The ranks of the engine that map the segment, in order."""
    num_layers: int = 0
    num_experts: int = 0
    """The largest number of experts in a layer."""
    kv_bytes: tuple[int, ...] = ()
    """Bytes of each stage's shared KV pool; empty: every rank has its own pool."""

    @property
    def num_bytes(self) -> int:
        """Size of the segment. Pages that nobody touches take no memory."""
        return max(_aligned(stop) for _, stop in self._parts.values())

    @cached_property
    def _parts(self) -> dict[tuple[str, int], tuple[int, int]]:
        """First byte and end of each part, by its name and the first rank that uses it."""
        num_ranks = len(self.ranks)
        sizes = {
            ("progress", 0): ProgressBoard.num_bytes(num_ranks),
            ("expert load", 0): ExpertLoadBoard.num_bytes(num_ranks, self.num_layers, self.num_experts),
        }
        for place in map(self.grid.place, self.ranks):
            for axis, peers in place.distinct_groups().items():
                if peers[0] == place.rank and self._holds(peers):
                    sizes[axis, place.rank] = _GROUP_BYTES
            peers = place.peers("tensor")
            if self.kv_bytes and peers[0] == place.rank and self._holds(peers):
                sizes["kv pool", place.rank] = self.kv_bytes[place.pp_rank]
            if place.next_stage in self.ranks:
                sizes["link", place.rank] = _LINK_BYTES
        parts, start = {}, 0
        for key, size in sizes.items():
            parts[key] = start, start + size
            start = _aligned(start + size)
        return parts

    def _holds(self, ranks: Sequence[int]) -> bool:
        return all(rank in self.ranks for rank in ranks)

    def _part(self, segment: memoryview, name: str, rank: int = 0) -> memoryview | None:
        part = self._parts.get((name, rank))
        return None if part is None else segment[part[0] : part[1]]

    def progress(self, segment: memoryview) -> ProgressBoard:
        """The progress board of the segment's ranks."""
        part = self._part(segment, "progress")
        assert part is not None
        return ProgressBoard(part, self.ranks)

    def expert_load(self, segment: memoryview) -> ExpertLoadBoard:
        """The counters of tokens per expert, of the segment's ranks."""
        part = self._part(segment, "expert load")
        assert part is not None
        return ExpertLoadBoard(part, self.ranks, self.num_layers, self.num_experts)

    def group(self, segment: memoryview, place: RankPlace, axis: Axis) -> memoryview | None:
        """The area of a rank's group on an axis; None: the group has ranks on other hosts."""
        return self._part(segment, axis, place.peers(axis)[0])

    def link(self, segment: memoryview, sender: int) -> memoryview | None:
        """The area of the link from rank `sender` to the next stage; None: one of its ends is on another host."""
        return self._part(segment, "link", sender)

    def kv_pool(self, segment: memoryview, place: RankPlace) -> memoryview | None:
        """The KV pool that a rank's tensor-parallel group shares; None: each rank has its own."""
        return self._part(segment, "kv pool", place.peers("tensor")[0])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
