"""The load of experts and ranks, from the tokens of each layer and expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardline.config.topology import RankGrid
from shardline.engine.expert_balancer import ExpertBalancer
from shardline.messages.stats import ExpertLoad
from shardline.models.partition import Span, split_dim
from shardline.segment.expert_load import Counts


def expert_load(
    counts: Counts,
    grid: RankGrid,
    stages: Sequence[Span],
    whole_experts: bool,
    balancer: ExpertBalancer | None = None,
) -> ExpertLoad | None:
    """The load of experts and ranks from `counts` [num_layers, num_experts]; None: the model has no experts.

    With `whole_experts`, each rank of a stage, over all replicas in lockstep, has some of the experts: those that
    `balancer` says, if they move. Otherwise every rank has a part of each expert, and all ranks of a stage have the
    same load.
    """
    if counts.size == 0:
        return None
    sharing = grid.sharing * grid.data
    spans = split_dim(counts.shape[1], sharing) if whole_experts else [Span(0, counts.shape[1])] * sharing
    by_rank = np.stack([counts[:, span.start : span.stop].sum(axis=1) for span in spans], axis=1)
    if balancer is not None:
        for layer, load in balancer.rank_load(counts).items():
            by_rank[layer] = load.round()
    rank_tokens = []
    for rank in range(grid.world_size):
        place = grid.place(rank)
        stage = stages[place.pp_rank]
        rank_tokens.append(int(by_rank[stage.start : stage.stop, place.peers("expert").index(rank)].sum()))
    return ExpertLoad(
        expert_tokens=counts.sum(axis=0).tolist(),
        rank_tokens=rank_tokens,
        expert_imbalance=_imbalance(counts),
        rank_imbalance=_imbalance(by_rank),
        moves=None if balancer is None else balancer.stats(),
    )


def _imbalance(counts: npt.NDArray[np.int64]) -> float:
    """The largest count of each row over its mean, averaged over rows that are not zero; 1 if all are zero."""
    busy = counts[counts.sum(axis=1) > 0]
    return float((busy.max(axis=1) / busy.mean(axis=1)).mean()) if len(busy) else 1.0
