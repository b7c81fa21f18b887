"""Drafts by a model: the ranks' guesses, which come with the result of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.speculative.payoff import Acceptance, Payoff
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep

_LONGEST_PAUSE = 15
"""Steps of a sequence without guesses after some that did not pay."""


@dataclass
class _Guesser:
    """What is known about the guesses of one sequence."""

    acceptance: Acceptance
    is_asked: bool = False
    """A step in flight is to have guesses."""
    guesses: list[int] = field(default_factory=list)
    """Those of the last step, which the next one may have."""
    pause: int = 0
    """Steps that ask for no guesses."""
    misses: int = 0
    """How often no guess was worth its row since the last one that was."""


class ModelProposer:
    """A `Proposer` that asks each step for guesses of what comes after it.

    As many are asked for as are worth their time, by what was accepted of the sequence and by the measured times of
    steps, the model's own passes included. A sequence whose guesses are worth none is asked for less and less often.
    """

    def __init__(self, config: Speculation) -> None:
        self._most = config.num_speculative_tokens
        self._payoff = Payoff(self._most)
        self._guessers: WeakKeyDictionary[LiveSequence, _Guesser] = WeakKeyDictionary()

    def wants(self, sequence: LiveSequence) -> bool:
        """See `Proposer`."""
        return self._find(sequence).is_asked

    def count_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """See `Proposer`."""
        guesser = self._find(sequence)
        # The step samples a token, and so does the one that has the guesses.
        most = min(self._most, limit, sequence.limit - sequence.num_tokens - 2)
        if not self._payoff.is_open or most <= 0:
            return 0
        if guesser.pause:
            guesser.pause -= 1
            return 0
        length = self._payoff.best_length(guesser.acceptance)
        if length == 0:
            # One guess, now and then, shows whether the text can be guessed again.
            guesser.misses += 1
            guesser.pause = min(2**guesser.misses - 1, _LONGEST_PAUSE)
        else:
            guesser.misses = 0
        guesser.is_asked = True
        return min(most, max(1, length))

    def propose(
        self, sequence: LiveSequence, limit: int, new_tokens: Sequence[int] = (), guesses: Sequence[int] = ()
    ) -> list[int]:
        """See `Proposer`."""
        most = min(limit, sequence.limit - len(sequence.tokens) - len(new_tokens) - 1)
        if new_tokens:
            return list(guesses[: max(0, most)])
        if sequence.num_pending:
            return []
        guesser = self._find(sequence)
        draft, guesser.guesses = guesser.guesses[: max(0, most)], []
        return draft

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """See `Proposer`."""
        guesser = self._find(sequence)
        guesser.guesses = list(result.guesses)
        guesser.is_asked = guesser.is_asked and not step.num_guesses
        if step.draft_token_ids:
            self._payoff.note_draft(guesser.acceptance, len(result.token_ids) - 1, len(step.draft_token_ids))

    def note_end(self, sequence: LiveSequence) -> None:
        """See `Proposer`."""

    def note_decode(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """See `Proposer`."""
        self._payoff.note_decode(num_sequences, num_rows, num_tokens, seconds)

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        return self._payoff.stats()

    def _find(self, sequence: LiveSequence) -> _Guesser:
        guesser = self._guessers.get(sequence)
        if guesser is None:
            guesser = self._guessers[sequence] = _Guesser(self._payoff.usual_acceptance())
        return guesser
