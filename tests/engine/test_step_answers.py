"""The answers of ranks become one result for each replica."""

from __future__ import annotations

from shardline.config.topology import RankGrid
from shardline.engine.executor.step_answers import StepAnswers
from shardline.messages.copies import BlockCopies, BlockCopy, CopyCounts, CopyResult
from shardline.messages.step import SequenceResult, StepPlan, StepResult

FETCHES = BlockCopies([BlockCopy(0, 5, 7, b"c")], [BlockCopy(0, 3, 8, b"a"), BlockCopy(0, 4, 9, b"b")])


def test_a_step_that_copies_is_answered_by_every_rank_of_its_replica() -> None:
    """Two replicas of four ranks; ranks 2 and 6 are the drivers. Rank 1 is a step ahead of the others."""
    answers = StepAnswers(RankGrid(pipeline=2, tensor=2, data=2))
    answers.expect([StepPlan(0, [], [], [], FETCHES), StepPlan(0, [], [], [])])
    answers.expect([StepPlan(1, [], [], [], FETCHES), StepPlan(1, [], [], [])])
    sampled = [SequenceResult(5, [7])]
    answers.put(6, StepResult(0, sampled))
    answers.put(1, StepResult(0, [], copied=CopyResult([8], [], CopyCounts(stored_bytes=3))))
    answers.put(1, StepResult(1, []))
    answers.put(2, StepResult(0, [], copied=CopyResult([9], [8], CopyCounts(stored_bytes=4, read_bytes=1))))
    answers.put(0, StepResult(0, [], copied=CopyResult()))
    assert not answers.has_oldest
    answers.put(3, StepResult(0, [], copied=CopyResult()))
    assert answers.has_oldest
    first, second = answers.take_oldest()
    assert (first.step_id, first.copied) == (0, CopyResult([9, 8], [8], CopyCounts(stored_bytes=7, read_bytes=1)))
    assert second == StepResult(0, sampled)
    for rank in (0, 2, 3, 6):
        assert not answers.has_oldest
        answers.put(rank, StepResult(1, []))
    assert answers.take_oldest() == [StepResult(1, [])] * 2


def test_other_steps_are_answered_by_the_drivers_alone() -> None:
    answers = StepAnswers(RankGrid(pipeline=2, tensor=2))
    answers.expect([StepPlan(0, [], [], [])])
    answers.put(2, StepResult(0, []))
    assert answers.has_oldest
    assert answers.take_oldest() == [StepResult(0, [])]
