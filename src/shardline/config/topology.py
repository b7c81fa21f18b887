"""The rank grid: the place of each rank of an engine on every parallel axis."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank, and the ranks with which it forms groups."""

    rank: int
    """Rank within the engine."""
    dp_rank: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    tp_peers: tuple[int, ...]
    """Ranks of the tensor-parallel group in order, this rank included."""
    ep_peers: tuple[int, ...]
    """Ranks of the stage over which whole experts are spread, in order: the TP groups of all replicas in lockstep."""
    previous_stage: int | None
    """The rank that sends its hidden states to this one; None in the first stage."""
    next_stage: int | None
    """The rank that receives this one's hidden states; None in the last stage."""

    def __str__(self) -> str:
        replica = f"dp {self.dp_rank}, " if len(self.ep_peers) > len(self.tp_peers) else ""
        return f"rank {self.rank} ({replica}pp {self.pp_rank}, tp {self.tp_rank})"


class RankGrid(msgspec.Struct, frozen=True):
    """The ranks of one engine as a grid [dp, pp, cp, tp]; tp varies fastest, so that its peers sit side by side.

    An engine has several replicas (dp) only if they run in lockstep; otherwise each replica has its own engine. The
    expert axis adds no ranks: it runs along tp and dp.
    """

    tensor: int
    pipeline: int
    context: int = 1
    data: int = 1
    expert: int = 1
    """Ranks of a stage over which whole experts are spread; 1: every rank has a part of each expert."""

    @property
    def replica_size(self) -> int:
        """Number of ranks in one replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def world_size(self) -> int:
        """Number of ranks in the engine."""
        return self.replica_size * self.data

    def place(self, rank: int) -> RankPlace:
        """The place of `rank`.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a grid of {self.world_size} ranks")
        stage_size = self.tensor * self.context
        dp_rank, within = divmod(rank, self.replica_size)
        pp_rank, within = divmod(within, stage_size)
        cp_rank, tp_rank = divmod(within, self.tensor)
        first_peer = rank - tp_rank
        first_of_replicas = [first_peer + (dp - dp_rank) * self.replica_size for dp in range(self.data)]
        return RankPlace(
            rank=rank,
            dp_rank=dp_rank,
            tp_rank=tp_rank,
            cp_rank=cp_rank,
            pp_rank=pp_rank,
            tp_peers=tuple(range(first_peer, first_peer + self.tensor)),
            ep_peers=tuple(first + tp for first in first_of_replicas for tp in range(self.tensor)),
            previous_stage=rank - stage_size if pp_rank > 0 else None,
            next_stage=rank + stage_size if pp_rank < self.pipeline - 1 else None,
        )

    @property
    def drivers(self) -> tuple[int, ...]:
        """The rank of each replica that reports sampled tokens: the first rank of its last stage."""
        first = (self.pipeline - 1) * self.tensor * self.context
        return tuple(replica * self.replica_size + first for replica in range(self.data))
