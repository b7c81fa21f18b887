"""The rank grid: the place of each rank of an engine on every parallel axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

COORDINATES: Mapping[str, str] = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp"}
"""The axes whose sizes users state, and their short names. The product of all sizes is the number of ranks."""

Axis = Literal["tensor", "expert", "context"]
GROUPS: Mapping[Axis, tuple[str, ...]] = {
    "tensor": ("tensor", "context"),
    "expert": ("data", "tensor", "context"),
    "context": ("context",),
}
"""The groups of ranks that exchange tensors within a layer, and the coordinates in which the ranks of a group differ.

The ranks of a context group share the keys of a request, and each layer's weights with all ranks of the tensor group.

"expert" are the ranks of a stage over which whole experts are spread: the tensor-parallel groups of all replicas in
lockstep.
"""


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank, and the ranks with which it forms groups."""

    rank: int
    """Rank within the engine."""
    dp_rank: int
    pp_rank: int
    cp_rank: int
    tp_rank: int
    groups: Mapping[Axis, tuple[int, ...]] = field(hash=False)
    """For each axis, the ranks of this rank's group in order, this rank included."""
    previous_stage: int | None
    """The rank that sends its hidden states to this one; None in the first stage."""
    next_stage: int | None
    """The rank that receives this one's hidden states; None in the last stage."""

    def __str__(self) -> str:
        replica = f"dp {self.dp_rank}, " if len(self.peers("expert")) > len(self.peers("tensor")) else ""
        context = f", cp {self.cp_rank}" if len(self.peers("context")) > 1 else ""
        return f"rank {self.rank} ({replica}pp {self.pp_rank}, tp {self.tp_rank}{context})"

    def peers(self, axis: Axis) -> tuple[int, ...]:
        """The ranks of this rank's group on an axis, in order, this rank included."""
        return self.groups[axis]

    @property
    def share(self) -> int:
        """The place among the ranks that share each layer's weights: which part of them this rank has."""
        return self.groups["tensor"].index(self.rank)

    def distinct_groups(self) -> dict[Axis, tuple[int, ...]]:
        """The groups of several ranks, without those that have the ranks of an earlier one."""
        distinct: dict[Axis, tuple[int, ...]] = {}
        for axis, peers in self.groups.items():
            if len(peers) > 1 and peers not in distinct.values():
                distinct[axis] = peers
        return distinct


class RankGrid(msgspec.Struct, frozen=True):
    """The ranks of one engine as a grid [dp, pp, tp, cp]; cp varies fastest, so that its peers sit side by side.

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
    def sharing(self) -> int:
        """Number of ranks that share each layer's weights."""
        return self.tensor * self.context

    @property
    def replica_size(self) -> int:
        """Number of ranks in one replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def world_size(self) -> int:
        """Number of ranks in the engine."""
        return self.replica_size * self.data

    def num_exchanging(self, axis: Axis) -> int:
        """Number of ranks that exchange on an axis; 1: none does."""
        if axis == "expert":
            return self.expert
        return math.prod(getattr(self, name) for name in GROUPS[axis])

    def place(self, rank: int) -> RankPlace:
        """The place of `rank`.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a grid of {self.world_size} ranks")
        sizes = {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor, "context": self.context}
        strides, stride = {}, 1
        for name, size in reversed(sizes.items()):
            strides[name], stride = stride, stride * size
        at = {name: rank // strides[name] % size for name, size in sizes.items()}
        groups: dict[Axis, tuple[int, ...]] = {}
        for axis, along in GROUPS.items():
            first = rank - sum(at[name] * strides[name] for name in along)
            steps = itertools.product(*(range(0, sizes[name] * strides[name], strides[name]) for name in along))
            groups[axis] = tuple(first + sum(step) for step in steps)
        stage_size = strides["pipeline"]
        return RankPlace(
            rank=rank,
            dp_rank=at["data"],
            pp_rank=at["pipeline"],
            cp_rank=at["context"],
            tp_rank=at["tensor"],
            groups=groups,
            previous_stage=rank - stage_size if at["pipeline"] > 0 else None,
            next_stage=rank + stage_size if at["pipeline"] < self.pipeline - 1 else None,
        )

    @property
    def drivers(self) -> tuple[int, ...]:
        """The rank of each replica that reports sampled tokens: the first rank of its last stage."""
        first = (self.pipeline - 1) * self.tensor * self.context
        return tuple(replica * self.replica_size + first for replica in range(self.data))
