"""From tokens per layer and expert to what the metrics show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardline.config.topology import RankGrid
from shardline.models.partition import Span, split_dim
from shardline.segment.expert_load import Counts
from shardline.stats import ExpertLoad


def expert_load(counts: Counts, grid: RankGrid, stages: Sequence[Span], whole_experts: bool) -> ExpertLoad | None:
    """What `counts` [num_layers, num_experts] says of the load of experts and ranks; None: the model has no experts.

    With `whole_experts` the experts are shared out over the ranks of a stage, those of all replicas in lockstep; else
    every rank has a part of each, and all ranks of a stage the same load.
    """
    if counts.size == 0:
        return None
    sharing = grid.tensor * grid.data
    spans = split_dim(counts.shape[1], sharing) if whole_experts else [Span(0, counts.shape[1])] * sharing
    by_rank = np.stack([counts[:, span.start : span.stop].sum(axis=1) for span in spans], axis=1)
    rank_tokens = []
    for rank in range(grid.world_size):
        place = grid.place(rank)
        stage = stages[place.pp_rank]
        rank_tokens.append(int(by_rank[stage.start : stage.stop, place.ep_peers.index(rank)].sum()))
    return ExpertLoad(
        expert_tokens=counts.sum(axis=0).tolist(),
        rank_tokens=rank_tokens,
        expert_imbalance=_imbalance(counts),
        rank_imbalance=_imbalance(by_rank),
    )


def _imbalance(counts: npt.NDArray[np.int64]) -> float:
    """Largest over mean of each row, averaged over the rows that count anything; 1 where none does."""
    busy = counts[counts.sum(axis=1) > 0]
    return float((busy.max(axis=1) / busy.mean(axis=1)).mean()) if len(busy) else 1.0
