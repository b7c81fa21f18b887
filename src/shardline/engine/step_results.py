"""Applies the results of steps to their sequences."""

from __future__ import annotations

import msgspec

from shardline.engine.schedule_state import ScheduleState
from shardline.engine.sequence import LiveSequence, State
from shardline.messages.request import SequenceOutput
from shardline.messages.step import SequenceResult, SequenceStep


class ResultApplier:
    """Appends tokens to sequences, ends those that are finished, and gives their blocks back."""

    def __init__(self, state: ScheduleState) -> None:
        self.state = state

    def apply(
        self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult | None, planned: float, now: float
    ) -> SequenceOutput | None:
        """Apply a collected step, which was planned at `planned`, to its sequence; returns what the front gets."""
        output = None
        sequence.num_in_flight -= 1
        sequence.num_computed = step.start + step.num_tokens - len(step.draft)
        if step.draft and result is not None and not result.error:
            self._accept_draft(sequence, step, len(result.token_ids) - 1)
        if step.start < sequence.num_start_tokens:
            sequence.recorder.note_chunk(step.start, step.num_tokens, planned, now)
        if step.sample:
            sequence.num_pending -= 1
        if sequence.state is not State.FINISHED:
            self.state.kv.slide_windows(sequence)
            if step.score and result is not None:
                sequence.append_scores(step.start, result.prompt_logprobs or [])
            if step.sample or (result is not None and result.error):
                assert result is not None
                output = self._take_result(sequence, result, now)
        self.state.queues.release(sequence)
        return output

    def _accept_draft(self, sequence: LiveSequence, step: SequenceStep, num_accepted: int) -> None:
        """The step has computed the keys and values of the accepted tokens, too."""
        sequence.num_computed += num_accepted
        sequence.num_scheduled += num_accepted
        assert self.state.drafter is not None
        self.state.drafter.note_result(sequence, step, num_accepted)

    def _take_result(self, sequence: LiveSequence, result: SequenceResult, now: float) -> SequenceOutput:
        queues, registry = self.state.queues, self.state.registry
        if result.error:
            queues.leave(sequence, State.FINISHED)
            return registry.fail_sequence(sequence, result.error, refused=result.refused)
        if result.embedding:
            queues.leave(sequence, State.FINISHED)
            return registry.finish_embedding(sequence, result.embedding)
        assert result.token_ids, "a step that samples must have a token"
        several = len(result.token_ids) > 1
        assert not (several and sequence.num_in_flight), "several tokens came while a later step was in flight"
        output = registry.take_result(sequence, result)
        self.state.kv.publish_blocks(sequence)
        recorder = sequence.recorder
        if recorder.awaits_token:
            recorder.note_token(now, running=sequence.state is State.RUNNING)
            output = msgspec.structs.replace(output, timeline=recorder.timeline())
        if output.finish_reason is not None:
            queues.leave(sequence, State.FINISHED)
        return output
