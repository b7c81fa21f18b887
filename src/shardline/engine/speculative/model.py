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

_KEPT = 0.8
"""See `Payoff`. A model guesses one text about as well all along."""
_BETWEEN_TRIES = 16
"""Steps from one that may ask for guesses of sequences for which they do not pay to the next one."""
_MOST_TRIED_TOKENS = 4096
"""What such steps may have the model compute; each step allows one more token."""


@dataclass
class _Guesser:
    """What is known about the guesses of one sequence."""

    acceptance: Acceptance
    is_asked: bool = False
    """A step in flight is to have guesses."""
    num_seen: int = 0
    """Its tokens that the model has computed."""
    guesses: list[int] = field(default_factory=list)
    """Those of the last step, which the next one may have."""


class ModelProposer:
    """A `Proposer` that asks each step for guesses of what comes after it.

    As many are asked for as are worth their time, by what was accepted of the sequence and by the measured times of
    steps, the model's own passes included. Now and then, one guess of other sequences shows whether they can be guessed
    again, as long as the model has to compute few tokens for it.
    """

    def __init__(self, config: Speculation) -> None:
        self._most = config.num_speculative_tokens
        self._payoff = Payoff(self._most, kept=_KEPT)
        self._num_decodes = self._num_tried = 0
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
        num_unseen = sequence.num_tokens - guesser.num_seen
        length = self._payoff.shared_length(guesser.acceptance)
        if (
            length == 0
            and self._num_decodes % _BETWEEN_TRIES == 0
            and self._num_tried + num_unseen <= self._num_decodes
        ):
            self._num_tried += num_unseen
            length = 1
        if length == 0:
            return 0
        guesser.is_asked, guesser.num_seen = True, sequence.num_tokens
        return min(most, length)

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
        self._num_decodes += 1
        self._num_tried = max(self._num_tried, self._num_decodes - _MOST_TRIED_TOKENS)
        self._payoff.note_decode(num_sequences, num_rows, num_tokens, seconds)

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        return self._payoff.stats()

    def _find(self, sequence: LiveSequence) -> _Guesser:
        guesser = self._guessers.get(sequence)
        if guesser is None:
            guesser = self._guessers[sequence] = _Guesser(self._payoff.usual_acceptance())
        return guesser
