"""Drafts without a model: what followed the last tokens of a sequence where they occurred before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.speculative.payoff import Acceptance, Gate, RowCost
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep

_LONGEST_PAUSE = 15
"""Steps without a draft after guesses that did not pay."""
_LONGEST_SEARCH_PAUSE = 3
"""Steps without a draft after nothing was found to guess from."""
_HOPELESS = 4
"""Guesses that did not pay with which a sequence begins if those of others have not."""
_KEPT_OF_SEQUENCE, _KEPT_OF_ALL = 0.5, 0.99
_FIRST_RIGHT, _FIRST_JUDGED = 1.2, 2.0
"""What a guess of a sequence is worth before one was judged."""


class Lookup(Protocol):
    """Finds guesses for one sequence."""

    def find_continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow `tokens`, which must begin with those of the last call."""


@dataclass
class _Guesser:
    """What is known about guesses of one sequence."""

    lookup: Lookup
    acceptance: Acceptance
    pause: int = 0
    """Steps that go without a draft."""
    misses: int = 0
    """How many drafts did not pay since the last one that did."""
    unmatched: int = 0
    """How often nothing was found since then."""

    def note_miss(self, count: int) -> None:
        """Note guesses that did not pay."""
        self.misses += count
        self.pause = min(2**self.misses - 1, _LONGEST_PAUSE)


class TextProposer:
    """A `Proposer` that answers at once.

    A draft is as long as each of its tokens is accepted more often than its row costs, by what was accepted of the
    sequence, and by the measured times of steps. If no token pays, or none is found, more and more steps go without a
    draft, and are planned ahead. So a text that nobody can guess costs little.
    """

    def __init__(self, config: Speculation, make_lookup: Callable[[LiveSequence], Lookup]) -> None:
        self._config = config
        self._make_lookup = make_lookup
        self._guessers: WeakKeyDictionary[LiveSequence, _Guesser] = WeakKeyDictionary()
        self._num_drafts = 0
        self._num_tokens = 0
        self._accepted = [0] * config.num_speculative_tokens
        self._gate = Gate()
        self._row_cost = RowCost()
        self._num_sequences = 1
        self._cost = self._row_cost.of_row(1)
        self._usual = Acceptance(_FIRST_RIGHT, _FIRST_JUDGED)
        """That of all sequences, with which new ones begin."""

    def wants(self, sequence: LiveSequence) -> bool:
        """See `Proposer`."""
        if sequence.has_grammar or sequence.limit - sequence.num_tokens <= 1:
            return False
        return self._gate.is_open and self._find(sequence).pause == 0

    def propose(self, sequence: LiveSequence, limit: int, new_tokens: Sequence[int] = ()) -> list[int]:
        """See `Proposer`."""
        tokens = [*sequence.tokens, *new_tokens] if new_tokens else sequence.tokens
        if not self._gate.is_open:
            return []
        guesser = self._find(sequence)
        if guesser.pause:
            guesser.pause -= 1
            return []
        limit = min(limit, sequence.limit - len(tokens) - 1, self._config.num_speculative_tokens)
        if limit <= 0 or (sequence.num_pending and not new_tokens):
            return []
        length = self._best_length(guesser.acceptance)
        draft = guesser.lookup.find_continuation(tokens, min(limit, max(1, length)))
        if not draft:
            guesser.unmatched += 1
            guesser.pause = min(guesser.unmatched // 2, _LONGEST_SEARCH_PAUSE)
        elif length == 0:
            # One guess, now and then, shows whether the text can be guessed again.
            guesser.note_miss(1)
        else:
            guesser.unmatched = guesser.misses = 0
        return draft

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """Note how many tokens of a step's draft were accepted."""
        if (num_proposed := len(step.draft_token_ids)) == 0:
            return
        num_accepted = len(result.token_ids) - 1
        self._num_drafts += 1
        self._num_tokens += num_proposed
        for position in range(num_accepted):
            self._accepted[position] += 1
        self._guessers[sequence].acceptance.note(num_accepted, num_proposed, _KEPT_OF_SEQUENCE)
        self._usual.note(num_accepted, num_proposed, _KEPT_OF_ALL)

    def note_decode(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """See `Proposer`."""
        usual = self._row_cost.plain_seconds(num_sequences)
        speed = num_tokens / num_sequences * usual / seconds if seconds else 0.0
        is_plain = self._gate.note(num_sequences, speed, seconds)
        if is_plain or num_rows > num_sequences:
            self._row_cost.note(num_sequences, num_rows, seconds)
        self._num_sequences, self._cost = num_sequences, self._row_cost.of_row(num_sequences)

    def _best_length(self, acceptance: Acceptance) -> int:
        return acceptance.best_length(self._cost, self._num_sequences, self._config.suffixes.min_token_prob)

    def note_end(self, sequence: LiveSequence) -> None:
        """See `Proposer`."""

    def _find(self, sequence: LiveSequence) -> _Guesser:
        guesser = self._guessers.get(sequence)
        if guesser is None:
            usual = Acceptance(_FIRST_JUDGED * self._usual.probability, _FIRST_JUDGED)
            guesser = self._guessers[sequence] = _Guesser(self._make_lookup(sequence), usual)
            if self._best_length(usual) == 0:
                guesser.note_miss(_HOPELESS)
        return guesser

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        return DraftStats(self._num_drafts, self._num_tokens, list(self._accepted))
