"""How the memory that all ranks of a replica map is shared out; no torch, so that the engine can make it."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.config.topology import RankGrid
from shardline.runtime.parallel.expert_load import ExpertLoadBoard
from shardline.runtime.parallel.progress import ProgressBoard

_GROUP_BYTES = 16 << 20
_LINK_BYTES = 4 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True)
class SegmentLayout:
    """Where the parts of an engine's shared segment lie: progress board, one area per TP group, one per group that
    shares experts across replicas, one per stage link, expert load."""

    grid: RankGrid
    num_layers: int = 0
    num_experts: int = 0
    """Of the layer that has most."""

    @property
    def num_bytes(self) -> int:
        """Size of the segment; pages that nobody touches cost nothing."""
        return self._load_start + ExpertLoadBoard.num_bytes(self.grid.world_size, self.num_layers, self.num_experts)

    @property
    def _groups_start(self) -> int:
        return -(-ProgressBoard.num_bytes(self.grid.world_size) // _ALIGNMENT) * _ALIGNMENT

    @property
    def _load_start(self) -> int:
        return self._links_start + self.grid.data * self._links_each * _LINK_BYTES

    @property
    def _links_start(self) -> int:
        num_groups = self.grid.world_size // self.grid.tensor
        if self.grid.data > 1:
            num_groups += self.grid.pipeline * self.grid.context
        return self._groups_start + num_groups * _GROUP_BYTES

    @property
    def _links_each(self) -> int:
        """Stage links of a replica: its ranks but for the last stage's."""
        return self.grid.replica_size - self.grid.tensor * self.grid.context

    def expert_load(self, segment: memoryview) -> ExpertLoadBoard:
        """The counters of tokens per expert."""
        return ExpertLoadBoard(
            segment[self._load_start : self.num_bytes], self.grid.world_size, self.num_layers, self.num_experts
        )

    def progress(self, segment: memoryview) -> memoryview:
        """The area of the progress board."""
        return segment[: ProgressBoard.num_bytes(self.grid.world_size)]

    def group(self, segment: memoryview, rank: int) -> memoryview:
        """The area of the tensor-parallel group of `rank`."""
        start = self._groups_start + (rank // self.grid.tensor) * _GROUP_BYTES
        return segment[start : start + _GROUP_BYTES]

    def expert_group(self, segment: memoryview, rank: int) -> memoryview:
        """The area of the group over which `rank` shares experts with other replicas."""
        first = self.grid.world_size // self.grid.tensor
        start = self._groups_start + (first + rank % self.grid.replica_size // self.grid.tensor) * _GROUP_BYTES
        return segment[start : start + _GROUP_BYTES]

    def link(self, segment: memoryview, sender: int) -> memoryview:
        """The area of the link from `sender` to its successor."""
        replica, within = divmod(sender, self.grid.replica_size)
        start = self._links_start + (replica * self._links_each + within) * _LINK_BYTES
        return segment[start : start + _LINK_BYTES]
