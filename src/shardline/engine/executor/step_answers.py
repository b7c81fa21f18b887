"""The answers of ranks to steps, joined to one result for each replica."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.config.topology import RankGrid
from shardline.messages.copies import CopyResult
from shardline.messages.step import StepPlan, StepResult


class StepAnswers:
    """The answers of ranks to the steps in flight, of which each replica gets one result."""

    def __init__(self, grid: RankGrid) -> None:
        self._replica_size = grid.replica_size
        self._drivers = grid.drivers
        self._steps: dict[int, tuple[int, dict[int, StepResult]]] = {}
        """For each step, the oldest first: how many ranks answer, and the answers so far."""

    def expect(self, plans: Sequence[StepPlan]) -> None:
        """Note that the ranks are given a step: the plan of each replica."""
        num_answers = sum(1 if plan.copies is None else self._replica_size for plan in plans)
        self._steps[plans[0].step_id] = num_answers, {}

    def put(self, rank: int, result: StepResult) -> None:
        """Note the answer of a rank."""
        self._steps[result.step_id][1][rank] = result

    @property
    def has_oldest(self) -> bool:
        """Whether all answers to the oldest step in flight are there."""
        num_answers, answers = next(iter(self._steps.values()))
        return len(answers) == num_answers

    def take_oldest(self) -> list[StepResult]:
        """The result of each replica for the oldest step. What a rank has lost is lost to its replica."""
        _, answers = self._steps.pop(next(iter(self._steps)))
        results = {driver // self._replica_size: answers[driver] for driver in self._drivers}
        for rank, answer in answers.items():
            replica = rank // self._replica_size
            if answer.copied is not None and rank not in self._drivers:
                copied = (results[replica].copied or CopyResult()) + answer.copied
                results[replica] = msgspec.structs.replace(results[replica], copied=copied)
        return list(results.values())
