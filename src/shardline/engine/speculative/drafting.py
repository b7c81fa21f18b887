"""Which drafts the steps of a scheduler have: those of its proposer, and the tokens that requests expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.speculative.proposer import Proposer
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep, StepPlan


class Drafting:
    """The drafts of one scheduler's sequences. A request that expects tokens has no others."""

    def __init__(self, proposer: Proposer | None) -> None:
        """Without a proposer, only expected tokens are drafts."""
        self._proposer = proposer

    def awaits_tokens(self, running: Iterable[LiveSequence]) -> bool:
        """Whether the next plan may have drafts once the results of those in flight are known."""
        return any(
            sequence.awaits_draft or (sequence.num_pending and self._may_draft(sequence)) for sequence in running
        )

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
            return sequence.expected_next(limit)
        return [] if self._proposer is None else self._proposer.propose(sequence, limit)

    def count_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """How many guesses of a sequence's next tokens its step asks for."""
        if self._proposer is None or sequence.expects:
            return 0
        return self._proposer.count_guesses(sequence, limit)

    def foresee(self, sequence: LiveSequence, result: SequenceResult, most: int) -> list[int]:
        """Up to `most` guesses of what follows the tokens of a result that is there, of a sequence with a grammar. A
        later plan has them as its draft if `SequenceQueues.give_mask` is told that the grammar allows them."""
        if sequence.expects:
            return sequence.expected_next(most, len(result.token_ids))
        proposer = self._proposer
        return [] if proposer is None else proposer.propose(sequence, most, result.token_ids, result.guesses)

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """Note the result of each step that samples, before its tokens become the sequence's."""
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
