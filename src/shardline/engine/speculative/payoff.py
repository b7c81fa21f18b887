"""Whether a draft pays: how often guesses are right, against what a further row of a step costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

_KEPT = 0.9
"""What remains of a step's weight when the next one has been measured."""
_FIRST_COST = 0.1
"""A row's cost beside a step's before it has been measured."""
_LEAST_COST = 0.01
_MARGIN = 1.5
"""How many times its cost a guess must be worth: a step with a draft is planned while no other one runs, and what a
batch gains at its other sequences comes too late for its slowest one."""
_LONGEST_STALL = 3.0
"""A step that took more than that many times as long as usual was held up by something else."""


class RowCost:
    """What the rows of guesses cost decode steps, beside steps of as many sequences without guesses.

    Everything is measured, recent steps weighing most, so nothing about the machine, the model or the load is assumed.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        """Seconds of a step without guesses, by its number of sequences."""
        self._extra = self._guesses = 0.0
        """Seconds that guesses have taken, and their number."""

    def note(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        """Note a step that only decoded, and whose rows are its sequences and their guesses."""
        usual = self._plain_seconds(num_sequences)
        if num_rows == num_sequences:
            known = self._plain.get(num_sequences, seconds)
            self._plain[num_sequences] = _KEPT * known + (1.0 - _KEPT) * min(seconds, _LONGEST_STALL * known)
        elif usual and seconds < _LONGEST_STALL * usual * num_rows / num_sequences:
            self._extra = _KEPT * self._extra + seconds - usual
            self._guesses = _KEPT * self._guesses + num_rows - num_sequences

    def of_row(self, num_sequences: int) -> float:
        """What a row for a guess costs a step of so many sequences, in tokens that the step would sample meanwhile."""
        usual = self._plain_seconds(num_sequences)
        if not usual or not self._guesses:
            return _FIRST_COST
        return min(1.0, max(_LEAST_COST, num_sequences * self._extra / self._guesses / usual))

    def _plain_seconds(self, num_sequences: int) -> float:
        """Those of the nearest number of sequences that has been seen; 0: none has."""
        if num_sequences in self._plain or not self._plain:
            return self._plain.get(num_sequences, 0.0)
        return self._plain[min(self._plain, key=lambda seen: abs(seen - num_sequences))]


@dataclass
class Acceptance:
    """How likely a guess is right if those before it were: `right` of `judged` ones."""

    right: float
    judged: float

    @property
    def probability(self) -> float:
        """At least once in a thousand guesses, and never certain."""
        return min(0.99, max(0.001, self.right / self.judged))

    def note(self, num_accepted: int, num_proposed: int, kept: float) -> None:
        """Note a draft; guesses behind the first wrong one tell nothing. `kept`: what remains of older ones' weight."""
        self.right = kept * self.right + num_accepted
        self.judged = kept * self.judged + num_accepted + (num_accepted < num_proposed)

    def best_length(self, cost: float, least: float = 0.0) -> int:
        """The number of guesses of which each is right so much more often than its row costs that a draft pays, and
        with at least the probability `least`."""
        needed = max(_MARGIN * cost, least)
        return int(math.log(needed) / math.log(self.probability)) if needed < 1.0 else 0
