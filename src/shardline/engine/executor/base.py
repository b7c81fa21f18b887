"""The seam between deciding and computing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shardline.runtime.messages import RankReport
from shardline.runtime.parallel.expert_load import Counts
from shardline.types import StepPlan, StepResult


class ExecutorFailure(RuntimeError):
    """A rank died, failed or missed a deadline; the message names it. The replica cannot go on."""


class Executor(ABC):
    """Runs StepPlans on all ranks of one replica.

    `submit` hands a plan over and returns; `collect` waits for the oldest plan's result. Results come in the order
    of submission. At most `max_in_flight` plans may be submitted and not collected.
    """

    max_in_flight: int

    @abstractmethod
    def start(self) -> list[RankReport]:
        """Load the model on every rank; returns when all are ready.

        Raises:
            ValueError: the configuration or the checkpoint is at fault.
            ExecutorFailure: a rank failed.
        """

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to every rank.

        Raises:
            ExecutorFailure: a rank is gone.
        """

    @abstractmethod
    def collect(self) -> StepResult:
        """The result of the oldest plan in flight.

        Raises:
            ExecutorFailure: a rank died or failed, or the step missed its deadline.
        """

    def watched(self) -> list[int]:
        """File descriptors that become readable when a rank dies while nothing is in flight."""
        return []

    def check(self) -> None:
        """Look after the ranks while nothing is in flight.

        Raises:
            ExecutorFailure: a rank is gone.
        """
        assert not self.watched(), "who names file descriptors to watch looks after them"

    @abstractmethod
    def expert_load(self) -> Counts:
        """Tokens of each expert since the start, [num_layers, num_experts]; empty: the model has no experts."""

    @abstractmethod
    def close(self) -> None:
        """End every rank. Never raises, never waits for long."""

    def kill(self) -> None:
        """End every rank at once, from any thread, when nobody is left to close the executor."""
        self.close()
