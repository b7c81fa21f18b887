"""Who is blamed for a late step."""

from __future__ import annotations

from shardline.config.topology import RankGrid
from shardline.segment.progress import ProgressBoard, late_ranks


def board(num_ranks: int) -> ProgressBoard:
    return ProgressBoard(memoryview(bytearray(ProgressBoard.num_bytes(num_ranks))), range(num_ranks))


def test_the_one_that_computes_while_others_wait() -> None:
    progress = board(3)
    for rank in (0, 2):
        progress.line(rank).waiting().__enter__()
    assert late_ranks(RankGrid(3, 1), progress.read(), 0) == [1]


def test_a_rank_that_finished_is_not_late() -> None:
    progress = board(2)
    progress.line(0).finish(4)
    assert late_ranks(RankGrid(2, 1), progress.read(), 4) == [1]
    assert late_ranks(RankGrid(2, 1), progress.read(), 5) == [0, 1]


def test_where_all_wait_the_one_that_arrived_least() -> None:
    progress = board(2)
    with progress.line(1).waiting():
        pass
    for rank in (0, 1):
        progress.line(rank).waiting().__enter__()
    assert late_ranks(RankGrid(2, 1), progress.read(), 0) == [0]


def test_later_stages_are_not_blamed_for_an_earlier_one() -> None:
    progress = board(4)
    for rank, arrivals in ((0, 5), (1, 4), (2, 1), (3, 1)):
        for _ in range(arrivals):
            progress.line(rank).waiting().__enter__()
    assert late_ranks(RankGrid(2, 2), progress.read(), 0) == [1]
