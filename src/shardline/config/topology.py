"""The rank grid: which place each rank of a replica has on every parallel axis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """Where one rank stands, and with whom it shares a group."""

    rank: int
    """Rank within the replica."""
    tp_rank: int
    cp_rank: int
    pp_rank: int
    tp_peers: tuple[int, ...]
    """Ranks of the tensor-parallel group, in order; includes this rank."""
    previous_stage: int | None
    """The rank that hands its hidden states to this one."""
    next_stage: int | None

    def __str__(self) -> str:
        return f"rank {self.rank} (pp {self.pp_rank}, tp {self.tp_rank})"


@dataclass(frozen=True)
class RankGrid:
    """The ranks of one replica as a grid [pp, cp, tp]; tp varies fastest, so that its peers sit side by side."""

    tensor: int
    pipeline: int
    context: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks in one replica."""
        return self.tensor * self.pipeline * self.context

    def place(self, rank: int) -> RankPlace:
        """The place of `rank`.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a grid of {self.world_size} ranks")
        stage_size = self.tensor * self.context
        pp_rank, within = divmod(rank, stage_size)
        cp_rank, tp_rank = divmod(within, self.tensor)
        first_peer = rank - tp_rank
        return RankPlace(
            rank=rank,
            tp_rank=tp_rank,
            cp_rank=cp_rank,
            pp_rank=pp_rank,
            tp_peers=tuple(range(first_peer, first_peer + self.tensor)),
            previous_stage=rank - stage_size if pp_rank > 0 else None,
            next_stage=rank + stage_size if pp_rank < self.pipeline - 1 else None,
        )

    @property
    def driver(self) -> int:
        """The rank that reports sampled tokens: the first of the last stage."""
        return (self.pipeline - 1) * self.tensor * self.context
