"""Whether a draft pays: how often guesses are right, against what a further row of a step costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardline.messages.stats import DraftStats

_KEPT = 0.9
"""What remains of a step's weight when the next one has been measured."""
_KEPT_OF_LONGER = 0.5
"""The same of a step without guesses that was longer than the next one."""
_FIRST_COST = 0.1
"""A row's cost beside a step's before it has been measured."""
_LEAST_COST = 0.01
_MARGIN_ALONE, _MARGIN = 1.1, 1.5
"""How many times its cost a guess must be worth, if a sequence is alone, and if it is not: what a batch gains at its
other sequences comes too late for its slowest one."""
_MOST_GUESSES = 64
_LONGEST_STALL = 3.0
"""A step that took more than that many times as long as usual was held up by something else."""


_SETTLING = 2
"""Steps after a gate has changed that were planned before, or while no other one ran."""
_TRIAL = 8
"""Steps after which an open gate may close."""
_FIRST_CLOSED, _LONGEST_CLOSED = 8, 512
_CLOSED_FOR_MORE = 32
"""Steps, at most, that a new gate is closed because that of more sequences is."""
_MEASURED, _BETWEEN, _UNKNOWN = 2, 128, 4
"""Steps that measure those without drafts, after so many with them, or so many that cannot be compared."""
_NEEDED_ALONE, _NEEDED = 0.99, 1.1
"""How many times as fast drafts must be, for one sequence and for several: the slowest one gains less than most."""


class Gate:
    """Decides whether anything is drafted: a batch with drafts, all its waits for tokens included, is compared with the
    same batch without them, and as long as it is not faster, fewer and fewer steps try again."""

    def __init__(self, of_more: Gate | None = None) -> None:
        """`of_more`: the gate of more sequences. If it is closed, this one opens later."""
        closed = 0 if of_more is None else of_more._closed
        self._is_open = False
        self._settling = 0
        self._left = max(_MEASURED, min(closed, _CLOSED_FOR_MORE))
        """Steps until it changes, if it is closed, or has not closed before."""
        self._num_steps = 0
        """Steps since it opened."""
        self._num_unknown = 0
        """Of these, those of which it is not known what they would take without drafts."""
        self._closed: int = 0
        """How long it was closed because drafts did not pay; 0: they did."""
        self._worth = self._spent = 0.0
        """What the tokens of recent steps would take without drafts, and what they took, in seconds."""

    @property
    def is_open(self) -> bool:
        """Whether the next plan may have drafts."""
        return self._is_open

    def note(self, num_sequences: int, speed: float, seconds: float) -> bool:
        """Note a step; `speed`: how many tokens each of its sequences got, on average, in a plain step's time; 0: that
        is not known. Returns whether it is one without drafts, and tells how long these take."""
        if self._settling:
            self._settling -= 1
            return False
        if not self._is_open:
            self._left -= 1
            if self._left <= 0:
                self._change()
            return True
        self._num_steps += 1
        if speed:
            self._worth = _KEPT * self._worth + speed * seconds
            self._spent = _KEPT * self._spent + seconds
        else:
            self._num_unknown += 1
        needed = _NEEDED if num_sequences > 1 else _NEEDED_ALONE
        if self._num_unknown >= _UNKNOWN:
            self._left = _MEASURED
            self._change()
        elif self._num_steps >= _TRIAL and self._worth < self._spent * needed:
            self._closed = min(_LONGEST_CLOSED, 2 * self._closed or _FIRST_CLOSED)
            self._left = self._closed
            self._change()
        elif self._num_steps >= _BETWEEN:
            self._closed, self._left = 0, _MEASURED
            self._change()
        return False

    def _change(self) -> None:
        self._is_open, self._settling, self._num_steps, self._num_unknown = not self._is_open, _SETTLING, 0, 0
        if self._closed:
            self._worth = self._spent = 0.0


class PlainTimes:
    """How long steps without guesses take, by their number of sequences, from one step's end to the next one's."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen_once: set[int] = set()
        """Numbers of sequences of which one such step has run. The first one of a shape is slow: it is recorded."""

    def note(self, num_sequences: int, seconds: float) -> None:
        """Note a step. What holds up a step makes it longer, never shorter: so shorter ones count more."""
        known = self._seconds.get(num_sequences)
        if known is not None:
            kept = _KEPT if seconds > known else _KEPT_OF_LONGER
            self._seconds[num_sequences] = kept * known + (1.0 - kept) * min(seconds, _LONGEST_STALL * known)
        elif num_sequences in self._seen_once:
            self._seen_once.remove(num_sequences)
            self._seconds[num_sequences] = seconds
        else:
            self._seen_once.add(num_sequences)

    def knows(self, num_sequences: int) -> bool:
        """Whether steps of so many sequences were measured, or those of a smaller number."""
        return any(count <= num_sequences for count in self._seconds)

    def of(self, num_sequences: int) -> float:
        """Seconds of a step of so many sequences. If none was measured, it lies on a line between the next smaller and
        the next larger number that was, and is at least as long as the former; without a smaller one, half of the
        latter's time is taken as its number's. 0: it is less than half of all numbers that were."""
        found = self._seconds.get(num_sequences)
        if found is not None:
            return found
        below = max((count for count in self._seconds if count < num_sequences), default=0)
        above = min((count for count in self._seconds if count > num_sequences), default=None)
        if above is None:
            return self._seconds.get(below, 0.0)
        if not below and 2 * num_sequences < above:
            return 0.0
        share, longest = (num_sequences - below) / (above - below), self._seconds[above]
        shortest = self._seconds.get(below, longest / 2)
        return shortest + share * (longest - shortest)


class RowCost:
    """What the rows of guesses cost decode steps, beside steps of as many sequences without guesses.

    Everything is measured, recent steps weighing most, so nothing about the machine, the model or the load is assumed.
    Seconds are those from one step's end to the next one's: a step with guesses is planned while no other one runs.
    """

    def __init__(self) -> None:
        self._plain = PlainTimes()
        self._extra: dict[int, tuple[float, float]] = {}
        """Seconds that guesses have taken, and their number, in steps of one sequence, of 2 to 3, of 4 to 7, and so on:
        a pass of a draft model costs the more, the fewer sequences share it."""

    def note(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        """Note a step that only decoded, and whose rows are its sequences and their guesses; without guesses, one that
        was planned ahead."""
        usual = self.plain_seconds(num_sequences)
        if num_rows == num_sequences:
            self._plain.note(num_sequences, seconds)
        elif self._plain.knows(num_sequences) and seconds < _LONGEST_STALL * usual * num_rows / num_sequences:
            extra, guesses = self._extra.get(num_sequences.bit_length(), (0.0, 0.0))
            extra, guesses = _KEPT * extra + seconds - usual, _KEPT * guesses + num_rows - num_sequences
            self._extra[num_sequences.bit_length()] = extra, guesses

    @property
    def is_known(self) -> bool:
        """Whether a step with guesses has been measured."""
        return bool(self._extra)

    def share_of_row(self, num_sequences: int) -> float:
        """What a row for a guess costs a step of so many sequences, as a part of its time."""
        usual, measured = self.plain_seconds(num_sequences), self._extra.get(num_sequences.bit_length())
        if not usual or measured is None:
            return _FIRST_COST / num_sequences
        extra, guesses = measured
        return max(0.0, extra / guesses / usual)

    def of_row(self, num_sequences: int) -> float:
        """The same in tokens that the step would sample meanwhile."""
        return min(1.0, max(_LEAST_COST, num_sequences * self.share_of_row(num_sequences)))

    def plain_seconds(self, num_sequences: int) -> float:
        """Seconds of a step without guesses; 0: it is not known."""
        return self._plain.of(num_sequences)

    def row_seconds(self) -> dict[int, float]:
        """See `DraftStats.row_seconds`."""
        return {1 << number - 1: max(0.0, extra / guesses) for number, (extra, guesses) in self._extra.items()}


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

    def best_length(self, cost: float, num_sequences: int = 1, least: float = 0.0) -> int:
        """The number of guesses that pay, each of which is right with at least the probability `least`.

        A guess is right if all before it were: with p**k. It pays if this is a greater part of what the sequence gets
        from a step than its row is of the step's time. So a sequence that gains much already holds up others no longer,
        and the speed of one that is alone is at its maximum. `cost`: see `RowCost.of_row`.
        """
        row = cost / num_sequences
        needed = cost * (_MARGIN if num_sequences > 1 else _MARGIN_ALONE)
        probability, gained = self.probability, 1.0
        right = probability
        for count in range(_MOST_GUESSES):
            if right < least or right * (1.0 + count * row) < needed * gained:
                return count
            gained += right
            right *= probability
        return _MOST_GUESSES

    def speed(self, length: int, cost: float) -> float:
        """How many times as fast a batch is if its sequences have drafts of this length and acceptance."""
        gained = sum(self.probability**count for count in range(length + 1))
        return gained / (1.0 + length * cost)


_TRIED_SHARE = 0.05
"""Part of the time that guesses may take which are not expected to pay."""

MANY_LATE = 32
"""Tokens that a draft model computes late in one step, from which on this shows in the step's time."""
_KEPT_OF_SEQUENCE, _KEPT_OF_ALL = 0.5, 0.99
_OWN_SHARE = 0.5
"""What a row costs of a sequence whose draft is made with those of others, as a part of the mean."""
_FIRST_RIGHT, _FIRST_JUDGED = 1.2, 2.0
"""What a guess of a sequence is worth before one was judged."""


class Payoff:
    """What has come of all drafts, and how long the next ones should be."""

    def __init__(self, most: int, least: float = 0.0, kept: float = _KEPT_OF_SEQUENCE) -> None:
        """`most`: tokens of a draft; `least`: see `Acceptance.best_length`; `kept`: what remains of a draft's weight
        after the sequence's next one."""
        self._least, self._kept = least, kept
        self._num_drafts = self._num_tokens = 0
        self._accepted = [0] * most
        self._gates: dict[int, Gate] = {}
        """By the numbers of sequences, in the classes of `RowCost`: drafts that pay for few need not pay for many."""
        self._row_cost = RowCost()
        self._num_sequences = 1
        self._cost = self._row_cost.of_row(1)
        self._usual = Acceptance(_FIRST_RIGHT, _FIRST_JUDGED)
        self._allowed = _FIRST_COST
        """Parts of a step that guesses may take which are not expected to pay."""
        self.late_seconds: float | None = None
        """What a token takes that a draft model computes late; None: it has not been measured."""

    @property
    def is_open(self) -> bool:
        """Whether anything may be drafted in this plan."""
        return self._gate_of(self._num_sequences).is_open

    def _gate_of(self, num_sequences: int) -> Gate:
        number = num_sequences.bit_length()
        if number not in self._gates:
            self._gates[number] = Gate(self._gates.get(number + 1))
        return self._gates[number]

    def begin_plan(self, num_sequences: int) -> None:
        """See `Proposer.begin_plan`."""
        self._num_sequences, self._cost = num_sequences, self._row_cost.of_row(num_sequences)

    def usual_acceptance(self) -> Acceptance:
        """That of all sequences, with which a new one begins."""
        return Acceptance(_FIRST_JUDGED * self._usual.probability, _FIRST_JUDGED)

    @property
    def knows_cost(self) -> bool:
        """Whether a step with guesses has been measured."""
        return self._row_cost.is_known

    def steps_until_try(self) -> int:
        """After how many steps a guess may be made that is not expected to pay; 0: at once."""
        missing = self._row_cost.share_of_row(self._num_sequences) - self._allowed
        return max(0, math.ceil(missing / _TRIED_SHARE))

    def note_try(self) -> None:
        """Note such a guess."""
        self._allowed -= self._row_cost.share_of_row(self._num_sequences)

    def best_length(self, acceptance: Acceptance) -> int:
        """How long a draft of a sequence with this acceptance should be in this plan."""
        return acceptance.best_length(self._cost, self._num_sequences, self._least)

    def shared_length(self, acceptance: Acceptance) -> int:
        """The same if drafts of all sequences are made together, so that another one costs less than its part of them.

        All have the length that is best for the usual sequence, or a smaller one if their guesses are worse. If each
        paid the mean, those that pay least would leave, and the others would seem to cost more.
        """
        if self._num_sequences == 1:
            return self.best_length(acceptance)
        own = acceptance.best_length(_OWN_SHARE * self._cost, self._num_sequences, self._least)
        return min(own, self.best_length(self._usual))

    def late_tokens_pay(self, acceptance: Acceptance, length: int, num_late: int, num_left: int) -> bool:
        """Whether drafts of this length gain more in the `num_left` tokens that a sequence will still get than it takes
        a draft model to compute the `num_late` ones that it has not seen."""
        needed = _NEEDED_ALONE if self._num_sequences == 1 else _NEEDED
        saved = 1.0 - needed / acceptance.speed(length, self._cost)
        of_token = self._row_cost.plain_seconds(self._num_sequences) / self._num_sequences
        return num_left * saved * of_token > num_late * (self.late_seconds or 0.0)

    def note_draft(self, acceptance: Acceptance, num_accepted: int, num_proposed: int) -> None:
        """Note a draft of a sequence."""
        self._num_drafts += 1
        self._num_tokens += num_proposed
        for position in range(num_accepted):
            self._accepted[position] += 1
        acceptance.note(num_accepted, num_proposed, self._kept)
        self._usual.note(num_accepted, num_proposed, _KEPT_OF_ALL)

    def note_decode(
        self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float, num_late: int = 0
    ) -> None:
        """See `Proposer.note_decode`. `num_late`: see `late_tokens_pay`; these are no cost of the guesses."""
        usual = self._row_cost.plain_seconds(num_sequences)
        if num_late and usual:
            if num_late >= MANY_LATE:
                others = usual * (1.0 + (num_rows / num_sequences - 1.0) * self._cost)
                found = max(0.0, seconds - others) / num_late
                self.late_seconds = found if self.late_seconds is None else (self.late_seconds + found) / 2
            seconds = max(min(usual, seconds), seconds - num_late * (self.late_seconds or 0.0))
        speed = num_tokens / num_sequences * usual / seconds if seconds else 0.0
        is_plain = self._gate_of(num_sequences).note(num_sequences, speed, seconds)
        if is_plain or (num_rows > num_sequences and num_late < MANY_LATE):
            self._row_cost.note(num_sequences, num_rows, seconds)
        self._allowed = min(1.0, self._allowed + _TRIED_SHARE)

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        costs = self._row_cost.row_seconds()
        return DraftStats(self._num_drafts, self._num_tokens, list(self._accepted), costs)
