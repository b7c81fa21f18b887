"""The layout of the memory segment that all ranks of an engine map. It needs no torch, since the engine makes it."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.config.topology import RankGrid, RankPlace
from shardline.segment.expert_load import ExpertLoadBoard
from shardline.segment.progress import ProgressBoard

_GROUP_BYTES = 16 << 20
_LINK_BYTES = 4 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True)
class SegmentLayout:
    """The places of the parts of an engine's shared segment.

    The parts in order: the progress board; an area per TP group; an area per group that shares experts across
    replicas; an area per stage link; the expert load; the KV pools that the ranks of a stage share.
    """

    grid: RankGrid
    num_layers: int = 0
    num_experts: int = 0
    """The largest number of experts in a layer."""
    kv_bytes: tuple[int, ...] = ()
    """Bytes of each stage's shared KV pool; empty: every rank has its own pool."""

    @property
    def num_bytes(self) -> int:
        """Size of the segment. Pages that nobody touches take no memory."""
        return self._kv_start + self.grid.data * sum(_aligned(size) for size in self.kv_bytes)

    @property
    def _groups_start(self) -> int:
        return _aligned(ProgressBoard.num_bytes(self.grid.world_size))

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
        """Number of stage links of a replica: one for each rank outside the last stage."""
        return self.grid.replica_size - self.grid.tensor * self.grid.context

    @property
    def _load_stop(self) -> int:
        return self._load_start + ExpertLoadBoard.num_bytes(self.grid.world_size, self.num_layers, self.num_experts)

    @property
    def _kv_start(self) -> int:
        return _aligned(self._load_stop)

    def kv_pool(self, segment: memoryview, place: RankPlace) -> memoryview | None:
        """The KV pool that the ranks of a replica's stage share; None if they do not share one."""
        if not self.kv_bytes:
            return None
        before = self.kv_bytes * place.dp_rank + self.kv_bytes[: place.pp_rank]
        start = self._kv_start + sum(_aligned(size) for size in before)
        return segment[start : start + self.kv_bytes[place.pp_rank]]

    def expert_load(self, segment: memoryview) -> ExpertLoadBoard:
        """The counters of tokens per expert."""
        return ExpertLoadBoard(
            segment[self._load_start : self._load_stop], self.grid.world_size, self.num_layers, self.num_experts
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
        """The area of the link from rank `sender` to the next stage."""
        replica, within = divmod(sender, self.grid.replica_size)
        start = self._links_start + (replica * self._links_each + within) * _LINK_BYTES
        return segment[start : start + _LINK_BYTES]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
