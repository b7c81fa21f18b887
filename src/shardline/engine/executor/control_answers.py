"""The answers of several ranks to one control message, joined."""

from __future__ import annotations

from collections.abc import Collection

from shardline.messages.control import Control, ControlDone


class ControlAnswers:
    """Joins the answers of `num_ranks` ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pending: dict[int, dict[int, ControlDone]] = {}
        """For each message, the answers of ranks so far."""
        self._joined: list[ControlDone] = []

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
        self._joined.append(ControlDone(answer.number, values, error))
        del self._pending[answer.number]
        return True

    def missing(self, number: int) -> Collection[int]:
        """The ranks that have not answered a message that is expected."""
        if number not in self._pending:
            return ()
        return [rank for rank in range(self._num_ranks) if rank not in self._pending[number]]

    def take(self) -> list[ControlDone]:
        """The joined answers since the last call."""
        joined, self._joined = self._joined, []
        return joined
