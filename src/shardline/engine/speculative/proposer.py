"""Which drafts the steps of a scheduler have, and what it needs of whatever proposes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep, StepPlan


class Proposer(Protocol):
    """Proposes tokens of sequences. Texts do not depend on it: workers accept the tokens that they sample anyway.

    A proposer may answer at once, from a sequence's tokens. If its guesses are computed by a step, it learns them from
    that step's result, and proposes them for a later plan.
    """

    @property
    def rests(self) -> bool:
        """Whether no sequence has a draft, and none asks for guesses, until further steps have been noted."""

    def begin_plan(self, num_sequences: int) -> None:
        """Note that the next plan decodes up to so many sequences."""

    def wants(self, sequence: LiveSequence) -> bool:
        """Whether the next step of a sequence may have a draft, so that it waits until all tokens are known."""

    def count_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """`num_guesses` of a step that decodes; up to `limit` of them can become a draft."""

    def count_first_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """The same of the step that ends the prompt of a sequence that is alone."""

    def propose(
        self, sequence: LiveSequence, limit: int, new_tokens: Sequence[int] = (), guesses: Sequence[int] = ()
    ) -> list[int]:
        """`draft_token_ids`: up to `limit` tokens that may follow those of a sequence; none, unless all of its tokens
        are known. It is called for each step that decodes.

        At least one token that the sequence may still get remains for the step to sample. For a sequence with a grammar
        it is called before its `new_tokens` are applied, as soon as they are there, with the `guesses` of the same
        result: the grammar must allow them.
        """

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """Note the result of each step that samples, before its tokens become the sequence's."""

    def note_end(self, sequence: LiveSequence) -> None:
        """Note that a sequence has all of its answer, unless it ends by an error."""

    def note_decode(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Note a step that only decoded so many sequences, sampled so many rows with those of drafts, and got so many
        tokens, and the time since the end of the step before it."""

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""


def make_proposer(config: Speculation) -> Proposer | None:
    """The proposer that the user has chosen; None: nothing is drafted, or ranks of their own draft, see `ranks`."""
    if config.num_speculative_tokens == 0 or (config.draft is not None and config.draft.ranks):
        return None
    if config.draft is not None:
        from shardline.engine.speculative.model import ModelProposer

        return ModelProposer(config)
    if config.suffixes.max_tree_depth:
        from shardline.engine.speculative.suffix import SuffixProposer

        return SuffixProposer(config)
    from shardline.engine.speculative.ngram import PromptLookup
    from shardline.engine.speculative.text_proposer import TextProposer

    return TextProposer(config, lambda _: PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max))


class Drafting:
    """The drafts of one scheduler's sequences: what its proposer proposes, or what a sequence's request expects."""

    def __init__(self, proposer: Proposer | None) -> None:
        """Without a proposer, only expected tokens are drafts."""
        self._proposer = proposer
        self.rests = proposer is None
        """See `Proposer.rests`; it is that of the plan in the making."""

    def awaits_tokens(self, running: Iterable[LiveSequence]) -> bool:
        """Whether the next plan may have drafts once the results of those in flight are known."""
        rests = self._proposer is None or self._proposer.rests
        return any(
            sequence.awaits_draft
            or (sequence.num_pending and (not rests or sequence.expects) and self._may_draft(sequence))
            for sequence in running
        )

    def begin_plan(self, num_sequences: int) -> None:
        """Note that the next plan decodes up to so many sequences, and find out whether the proposer rests."""
        if self._proposer is not None:
            self._proposer.begin_plan(num_sequences)
            self.rests = self._proposer.rests

    def _may_draft(self, sequence: LiveSequence) -> bool:
        """Whether the next step of a sequence may have a draft, once all of its tokens are known."""
        if sequence.expects:
            return sequence.may_expect
        return self._proposer is not None and self._proposer.wants(sequence)

    def propose(self, sequence: LiveSequence, limit: int) -> list[int]:
        """A draft of up to `limit` tokens for the next step of a sequence, if its tokens are known."""
        if sequence.allowed:
            return sequence.foreseen[: max(0, limit)]
        if sequence.expects:
            return _expected_next(sequence, limit)
        return [] if self._proposer is None else self._proposer.propose(sequence, limit)

    def count_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """How many guesses of a sequence's next tokens its step asks for."""
        if self._proposer is None or sequence.expects:
            return 0
        return self._proposer.count_guesses(sequence, limit)

    def ask_with_prompt(self, sequence: LiveSequence, step: SequenceStep, limit: int) -> SequenceStep:
        """The only step of a plan. If it ends a prompt, it may ask for guesses, too, so that the next has a draft."""
        asks = step.sample and not step.decodes and not step.allowed and not sequence.expects
        if self._proposer is None or not asks:
            return step
        return msgspec.structs.replace(step, num_guesses=self._proposer.count_first_guesses(sequence, limit))

    def foresee(self, sequence: LiveSequence, result: SequenceResult, most: int) -> list[int]:
        """Up to `most` guesses of what follows the tokens of a result that is there, of a sequence with a grammar. A
        later plan has them as its draft if `SequenceQueues.give_mask` is told that the grammar allows them."""
        if sequence.expects:
            return _expected_next(sequence, most, len(result.token_ids))
        proposer = self._proposer
        return [] if proposer is None else proposer.propose(sequence, most, result.token_ids, result.guesses)

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """Note the result of each step that samples, before its tokens become the sequence's."""
        if self.rests and not (step.draft_token_ids or step.num_guesses):
            return
        if self._proposer is not None and not sequence.expects:
            self._proposer.note_result(sequence, step, result)

    def note_step(self, plan: StepPlan, results: Sequence[SequenceResult], seconds: float) -> None:
        """Note a step, and the time since the end of the step before it."""
        if self._proposer is not None and plan.steps and not plan.starts and all(s.decodes for s in plan.steps):
            num_sampled = sum(len(entry.token_ids) for entry in results)
            self._proposer.note_decode(len(plan.steps), plan.num_tokens, num_sampled, seconds)

    def note_end(self, sequence: LiveSequence) -> None:
        """Note that a sequence has all of its answer, unless it ends by an error."""
        if self._proposer is not None:
            self._proposer.note_end(sequence)

    def stats(self) -> DraftStats | None:
        """Counters of the proposer since the engine's start; None: there is none."""
        return None if self._proposer is None else self._proposer.stats()


def _expected_next(sequence: LiveSequence, most: int, later: int = 0) -> list[int]:
    """Up to `most` tokens that a request expects after its output, and after `later` tokens of a result that its
    sequence has not got yet; at least one that it may still get is left for the step to sample."""
    if not later and (sequence.num_pending or not sequence.may_expect):
        return []
    first, room = sequence.num_output_tokens + later, sequence.limit - len(sequence.tokens) - later - 1
    return sequence.request.expected_token_ids[first : first + max(0, min(most, room))]
