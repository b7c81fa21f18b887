"""Who is blamed for a late step."""

from __future__ import annotations

from shardline.runtime.parallel.progress import ProgressBoard


def board(num_ranks: int) -> ProgressBoard:
    return ProgressBoard(memoryview(bytearray(ProgressBoard.num_bytes(num_ranks))), num_ranks)


def test_the_one_that_computes_while_others_wait() -> None:
    progress = board(3)
    for rank in (0, 2):
        progress.line(rank).waiting().__enter__()
    assert progress.late_ranks(0) == [1]


def test_a_rank_that_finished_is_not_late() -> None:
    progress = board(2)
    progress.line(0).finish(4)
    assert progress.late_ranks(4) == [1]
    assert progress.late_ranks(5) == [0, 1]


def test_where_all_wait_the_one_that_arrived_least() -> None:
    progress = board(2)
    with progress.line(1).waiting():
        pass
    for rank in (0, 1):
        progress.line(rank).waiting().__enter__()
    assert progress.late_ranks(0) == [0]
