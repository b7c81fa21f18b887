from __future__ import annotations

import numpy as np

from shardline.config.topology import RankGrid
from shardline.engine.expert_load import expert_load
from shardline.messages.stats import ExpertLoad
from shardline.models.partition import Span

COUNTS = np.array([[4, 0, 2], [0, 0, 0], [3, 3, 0]])
STAGES = (Span(0, 2), Span(2, 3))


def test_whole_experts_load_the_ranks_that_have_them() -> None:
    load = expert_load(COUNTS, RankGrid(tensor=2, pipeline=2), STAGES, whole_experts=True)
    # Rank 0 of a group has experts 0 and 1, rank 1 expert 2; the layer that counts nothing is left out of the means.
    assert load == ExpertLoad([7, 3, 2], [4, 2, 6, 0], (2.0 + 1.5) / 2, (4 / 3 + 2) / 2)


def test_split_experts_load_all_ranks_alike() -> None:
    load = expert_load(COUNTS, RankGrid(tensor=2, pipeline=2), STAGES, whole_experts=False)
    assert load is not None
    assert load.rank_tokens == [6, 6, 6, 6]
    assert load.rank_imbalance == 1.0


def test_without_tokens_or_experts() -> None:
    grid = RankGrid(tensor=1, pipeline=1)
    assert expert_load(np.zeros((1, 2), dtype=np.int64), grid, (Span(0, 1),), False) == ExpertLoad(
        [0, 0], [0], 1.0, 1.0
    )
    assert expert_load(np.zeros((0, 0), dtype=np.int64), grid, (Span(0, 1),), False) is None
