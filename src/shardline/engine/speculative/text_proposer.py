"""Drafts without a model: what followed the last tokens of a sequence where they occurred before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.speculative.payoff import Acceptance, Payoff
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep

_LONGEST_PAUSE = 15
"""Steps without a draft after guesses that did not pay."""
_LONGEST_SEARCH_PAUSE = 3
"""Steps without a draft after nothing was found to guess from."""
_HOPELESS = 4
"""Guesses that did not pay with which a sequence begins if those of others have not."""


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

    def __init__(
        self,
        config: Speculation,
        make_lookup: Callable[[LiveSequence], Lookup],
        longest_search_pause: int = _LONGEST_SEARCH_PAUSE,
    ) -> None:
        """`longest_search_pause`: steps without a draft after nothing was found."""
        self._longest_search_pause = longest_search_pause
        self._config = config
        self._make_lookup = make_lookup
        self._guessers: WeakKeyDictionary[LiveSequence, _Guesser] = WeakKeyDictionary()
        self._payoff = Payoff(config.num_speculative_tokens, config.suffixes.min_token_prob)

    @property
    def rests(self) -> bool:
        """See `Proposer`."""
        return not self._payoff.is_open

    def begin_plan(self, num_sequences: int) -> None:
        """See `Proposer`."""
        self._payoff.begin_plan(num_sequences)

    def wants(self, sequence: LiveSequence) -> bool:
        """See `Proposer`."""
        if sequence.has_grammar or sequence.limit - sequence.num_tokens <= 1:
            return False
        return self._payoff.is_open and self._find(sequence).pause == 0

    def count_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """See `Proposer`."""
        return 0

    count_first_guesses = count_guesses

    def propose(
        self, sequence: LiveSequence, limit: int, new_tokens: Sequence[int] = (), guesses: Sequence[int] = ()
    ) -> list[int]:
        """See `Proposer`."""
        tokens = [*sequence.tokens, *new_tokens] if new_tokens else sequence.tokens
        if not self._payoff.is_open:
            return []
        guesser = self._find(sequence)
        if guesser.pause:
            guesser.pause -= 1
            return []
        limit = min(limit, sequence.limit - len(tokens) - 1, self._config.num_speculative_tokens)
        if limit <= 0 or (sequence.num_pending and not new_tokens):
            return []
        length = self._payoff.best_length(guesser.acceptance)
        is_try = length == 0 or not self._payoff.knows_cost
        if is_try and (steps := self._payoff.steps_until_try()):
            guesser.pause = min(steps - 1, _LONGEST_PAUSE)
            return []
        draft = guesser.lookup.find_continuation(tokens, 1 if is_try else min(limit, length))
        if not draft:
            guesser.unmatched += 1
            guesser.pause = min(guesser.unmatched // 2, self._longest_search_pause)
        elif length == 0:
            guesser.note_miss(1)
        else:
            guesser.unmatched = guesser.misses = 0
        if draft and is_try:
            # One guess, now and then, shows whether the text can be guessed again, and what a guess costs.
            self._payoff.note_try()
        return draft

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """Note how many tokens of a step's draft were accepted."""
        if step.draft_token_ids:
            num_accepted = len(result.token_ids) - 1
            self._payoff.note_draft(self._guessers[sequence].acceptance, num_accepted, len(step.draft_token_ids))

    def note_decode(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """See `Proposer`."""
        self._payoff.note_decode(num_sequences, num_rows, num_tokens, seconds)

    def note_end(self, sequence: LiveSequence) -> None:
        """See `Proposer`."""

    def _find(self, sequence: LiveSequence) -> _Guesser:
        guesser = self._guessers.get(sequence)
        if guesser is None:
            usual = self._payoff.usual_acceptance()
            guesser = self._guessers[sequence] = _Guesser(self._make_lookup(sequence), usual)
            if self._payoff.best_length(usual) == 0:
                guesser.note_miss(_HOPELESS)
        return guesser

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        return self._payoff.stats()
