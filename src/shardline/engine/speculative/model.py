"""Drafts by a model: the ranks' guesses, which come with the result of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.speculative.payoff import MANY_LATE, Acceptance, Payoff
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep

_KEPT = 0.8
"""See `Payoff`. A model guesses one text about as well all along."""
_BETWEEN_TRIES = 16
"""Steps from one that may ask for guesses of sequences for which they do not pay to the next one."""
_MOST_TRIED_TOKENS = 4096
"""What such steps may have the model compute; each step allows one more token."""
_MANY_MORE = 2
"""How many times as many late tokens as tokens that are left are a risk."""


@dataclass
class _Guesser:
    """What is known about the guesses of one sequence."""

    acceptance: Acceptance
    is_asked: bool = False
    """A step in flight is to have guesses."""
    num_seen: int = 0
    """Its tokens that the model has computed."""
    num_late: int = 0
    """Of these, those that the step in flight has it compute beside the tokens of a step or two."""
    is_new: bool = True
    """It was not decided yet whether its late tokens are worth their time."""
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
        self._num_prompts = self._num_decodes = self._num_tried = self._num_late = 0
        self._is_measuring = False
        """The step in flight computes many late tokens of one sequence, and what these take is not known."""
        self._usual_output: float | None = None
        """Tokens of recent answers; None: none has ended."""
        self._guessers: WeakKeyDictionary[LiveSequence, _Guesser] = WeakKeyDictionary()
        self._asking: WeakSet[LiveSequence] = WeakSet()
        """Those that have asked for guesses, and have not had a draft of them."""

    @property
    def rests(self) -> bool:
        """See `Proposer`."""
        return not self._payoff.is_open and not self._asking

    def begin_plan(self, num_sequences: int) -> None:
        """See `Proposer`."""
        self._num_late = 0  # a step that computed prompts, too, tells nothing
        self._payoff.begin_plan(num_sequences)

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
        # Of a prefix in the cache, the model has seen what it drafted for, and it drafts where that pays.
        cached = 0 if guesser.num_seen else sequence.num_cached_tokens or 0
        num_late = max(0, num_unseen - cached - 2 * (1 + self._most))
        length = self._payoff.shared_length(guesser.acceptance)
        if length and num_late and not self._late_tokens_pay(sequence, length, num_late):
            length = 0
        if (
            length == 0
            and self._num_decodes % _BETWEEN_TRIES == 0
            and self._num_tried + num_unseen <= self._num_decodes
        ):
            self._num_tried += num_unseen
            length = 1
        if length == 0:
            return 0
        guesser.is_asked, guesser.num_seen, guesser.num_late = True, sequence.num_tokens, num_late
        self._asking.add(sequence)
        return min(most, length)

    def count_first_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """See `Proposer`. What late tokens take is measured in steps that only decode, from time to time again."""
        self._num_prompts += 1
        is_known = self._payoff.late_seconds is not None and self._num_prompts % _BETWEEN_TRIES
        if not is_known and sequence.num_tokens - (sequence.num_cached_tokens or 0) >= MANY_LATE:
            return 0
        return self.count_guesses(sequence, limit)

    def _late_tokens_pay(self, sequence: LiveSequence, length: int, num_late: int) -> bool:
        """Whether the rest of an answer is worth its late tokens. If these are many more, a step shows first how many
        sequences there are now, and until late tokens have been measured, one sequence of a batch tries it."""
        guesser, left = self._find(sequence), sequence.limit - sequence.num_tokens
        left = left if self._usual_output is None else min(left, int(self._usual_output))
        are_many = num_late > _MANY_MORE * left
        is_new, guesser.is_new = guesser.is_new, False
        if is_new and are_many:
            return False
        if self._payoff.late_seconds is None:
            tries = not (are_many and self._is_measuring)
            self._is_measuring |= are_many
            return tries
        return self._payoff.late_tokens_pay(guesser.acceptance, length, num_late, left)

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
        self._asking.discard(sequence)
        return draft

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """See `Proposer`."""
        guesser = self._find(sequence)
        guesser.guesses = list(result.guesses)
        if step.num_guesses:
            guesser.is_asked = False
            self._num_late += guesser.num_late
            self._is_measuring = False
        if step.draft_token_ids:
            self._payoff.note_draft(guesser.acceptance, len(result.token_ids) - 1, len(step.draft_token_ids))

    def note_end(self, sequence: LiveSequence) -> None:
        """See `Proposer`."""
        self._asking.discard(sequence)
        length = sequence.num_output_tokens
        self._usual_output = length if self._usual_output is None else _KEPT * self._usual_output + (1 - _KEPT) * length

    def note_decode(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """See `Proposer`."""
        self._is_measuring = False
        self._num_decodes += 1
        self._num_tried = max(self._num_tried, self._num_decodes - _MOST_TRIED_TOKENS)
        self._payoff.note_decode(num_sequences, num_rows, num_tokens, seconds, self._num_late)

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        return self._payoff.stats()

    def _find(self, sequence: LiveSequence) -> _Guesser:
        guesser = self._guessers.get(sequence)
        if guesser is None:
            guesser = self._guessers[sequence] = _Guesser(self._payoff.usual_acceptance())
        return guesser
