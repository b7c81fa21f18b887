"""What an engine needs of whatever runs its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from shardline.deployment.deployment import KVAllocation
from shardline.messages.control import Control, ControlDone
from shardline.messages.stats import RankTimes
from shardline.messages.step import StepPlan, StepResult
from shardline.messages.worker import RankReport
from shardline.segment.expert_load import Counts


class ExecutorFailure(RuntimeError):
    """A rank died, failed or missed a deadline; the message names it. The replica cannot go on.

    `host_lost`, `suspicious`, `stalled_for`: as in `messages.engine.EngineFailed`.
    """

    def __init__(
        self, message: str, *, host_lost: bool = False, suspicious: bool = False, stalled_for: float = 0.0
    ) -> None:
        super().__init__(message)
        self.host_lost = host_lost
        self.suspicious = suspicious
        self.stalled_for = stalled_for


class ControlAnswers:
    """Joins the answers of `num_ranks` ranks to each control message."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pending: dict[int, dict[int, ControlDone]] = {}
        """For each message, the answers of ranks so far."""
        self.joined: list[ControlDone] = []
        """Those of all ranks that nobody has taken."""

    def expect(self, control: Control) -> None:
        """Each rank will answer this message."""
        self._pending[control.number] = {}

    def add(self, rank: int, answer: ControlDone) -> bool:
        """Add a rank's answer; returns whether it is the last one to its message."""
        if (answers := self._pending.get(answer.number)) is None:
            return False
        answers[rank] = answer
        if len(answers) < self._num_ranks:
            return False
        in_order = [answers[rank] for rank in range(self._num_ranks)]
        error = next((answer.error for answer in in_order if answer.error), "")
        values = () if error else tuple(value for answer in in_order for value in answer.values)
        self.joined.append(ControlDone(answer.number, values, error))
        del self._pending[answer.number]
        return True

    def missing(self, number: int) -> Collection[int]:
        """The ranks that have not answered a message that is expected."""
        if number not in self._pending:
            return ()
        return [rank for rank in range(self._num_ranks) if rank not in self._pending[number]]

    def take(self, *, own: bool = False) -> list[ControlDone]:
        """The joined answers since the last call: those to the front's messages, or those to the engine's own, whose
        numbers are negative."""
        taken = [done for done in self.joined if (done.number < 0) is own]
        self.joined = [done for done in self.joined if (done.number < 0) is not own]
        return taken


class Executor(ABC):
    """Runs steps on all ranks of an engine. A step is one StepPlan per replica, all with the same step id.

    `submit_step` hands a step over and returns; `collect_results` waits for the results of the oldest step. Results
    come in the order of submission. At most `max_in_flight` steps may be submitted and not collected.
    """

    max_in_flight: int
    allocation: KVAllocation
    """The size of the KV pool, known once `start` has returned."""
    answers: ControlAnswers
    """The answers to control messages. They come while `submit_control`, `collect_results` or `check_ranks` runs."""

    @abstractmethod
    def start(self) -> list[RankReport]:
        """Load the model on every rank; returns when all are ready.

        Raises:
            ValueError: the configuration or the checkpoint is at fault.
            ExecutorFailure: a rank failed.
        """

    @abstractmethod
    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        """Hand a step, the plan of each replica, to the ranks.

        Raises:
            ExecutorFailure: a rank is gone.
        """

    @abstractmethod
    def collect_results(self) -> list[StepResult]:
        """The result of each replica for the oldest step in flight.

        Raises:
            ExecutorFailure: a rank died or failed, or the step missed its deadline.
        """

    @abstractmethod
    def submit_control(self, control: Control) -> None:
        """Hand a control message to all ranks, behind the steps that have been submitted.

        Raises:
            ExecutorFailure: a rank is gone, or failed.
        """

    def watched_fds(self) -> list[int]:
        """File descriptors that become readable when a rank answers or dies while nothing is in flight."""
        return []

    def check_ranks(self) -> float | None:
        """Check that all ranks are alive while nothing is in flight.

        Returns the seconds after which to call it again, if no file descriptor becomes readable before; None: never.

        Raises:
            ExecutorFailure: a rank is gone, or does not answer.
        """
        assert not self.watched_fds(), "an executor that names file descriptors overrides this"
        return None

    @abstractmethod
    def expert_load(self) -> Counts:
        """Tokens of each expert since the start, [num_layers, num_experts]; empty: the model has no experts."""

    def rank_times(self) -> list[RankTimes]:
        """How the ranks have spent their time, in their order; empty: nobody has counted."""
        return []

    @abstractmethod
    def close(self) -> None:
        """End every rank. Never raises, never waits for long."""
