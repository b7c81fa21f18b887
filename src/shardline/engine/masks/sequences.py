"""Gives the scheduler the masks of constrained sequences, and ends the sequences whose grammar is at its end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.engine.masks.lanes import MaskLanes
from shardline.engine.masks.service import MaskAnswer
from shardline.engine.scheduling.scheduler import Scheduler
from shardline.engine.scheduling.sequence import LiveSequence, State
from shardline.messages.step import StepResult

PATIENCE = 0.005
"""Seconds without an answer after which the next step goes on without the sequences that have no mask yet."""

_MOST_GUESSES = 8
"""Each has a mask, which takes up to 20 KB in the plan and up to 1 ms."""


class SequenceMasks:
    """The constrained sequences of an engine, each with the scheduler that it belongs to."""

    def __init__(self, lanes: MaskLanes) -> None:
        self._lanes = lanes
        self.followed: dict[int, tuple[Scheduler, LiveSequence]] = {}
        """Those that have not ended, by the keys of their masks."""
        self._num_begun = 0

    def begin(self, scheduler: Scheduler, sequence: LiveSequence) -> None:
        """Ask for the first mask of a sequence that has just been added; it waits until the mask is there."""
        constraints = sequence.request.constraints
        assert constraints is not None
        key = self._num_begun
        self._num_begun += 1
        self.followed[key] = scheduler, sequence
        sequence.mask_key = key
        request = sequence.request
        self._lanes.start(key, constraints.grammar, request.eos_token_ids, request.output_token_ids)

    def follow_results(self, schedulers: Sequence[Scheduler], results: Sequence[StepResult]) -> list[StepResult]:
        """The results of the oldest step in flight, with the sequences marked whose grammar is at its end.

        Asks for the masks after the sampled tokens, and waits for them as long as they come quickly.
        """
        awaited: dict[int, int] = {}
        """The places of results, by key."""
        replaced = [list(result.results) for result in results]
        for scheduler, entries in zip(schedulers, replaced, strict=True):
            places = {entry.seq_id: place for place, entry in enumerate(entries)}
            flight = scheduler.in_flight[0]
            for sequence, step in zip(flight.sequences, flight.plan.steps, strict=True):
                if step.allowed and sequence.state is not State.FINISHED:
                    place = places[step.seq_id]
                    if not entries[place].error:
                        awaited[sequence.mask_key] = place
                        guesses = scheduler.foresee(sequence, entries[place], _MOST_GUESSES)
                        self._lanes.advance(sequence.mask_key, entries[place].token_ids, guesses)
        while awaited and (answers := self._lanes.collect(PATIENCE)):
            for key, answer in answers:
                if (awaited_place := awaited.pop(key, None)) is not None and answer.finished:
                    entries = replaced[schedulers.index(self.followed[key][0])]
                    entries[awaited_place] = msgspec.structs.replace(entries[awaited_place], finished=True)
                    del self.followed[key]
                    self._lanes.drop(key)
                else:
                    self._apply(key, answer)
        return [
            msgspec.structs.replace(result, results=entries) for result, entries in zip(results, replaced, strict=True)
        ]

    def collect(self, timeout: float) -> None:
        """Apply the masks that have come; waits up to `timeout` seconds for the first one."""
        for key, answer in self._lanes.collect(timeout):
            self._apply(key, answer)

    def forget_finished(self) -> None:
        """Drop the sequences that have ended."""
        for key in [key for key, (_, sequence) in self.followed.items() if sequence.state is State.FINISHED]:
            del self.followed[key]
            self._lanes.drop(key)

    def close(self) -> None:
        """End the processes that compute masks."""
        self._lanes.close()

    def _apply(self, key: int, answer: MaskAnswer) -> None:
        scheduler, sequence = self.followed[key]
        if sequence.state is State.FINISHED:
            return
        if answer.error:
            scheduler.queues.leave(sequence, State.FINISHED)
            scheduler.registry.finish_sequence(sequence, "error", answer.error)
        elif answer.finished or len(sequence.tokens) >= sequence.limit:
            scheduler.queues.leave(sequence, State.FINISHED)
            scheduler.registry.finish_sequence(sequence, "stop" if answer.finished else "length")
        else:
            scheduler.queues.give_mask(sequence, answer.words, answer.guesses)
