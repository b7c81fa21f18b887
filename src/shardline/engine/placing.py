"""Puts steps of sequences into a plan, and gives the sequences the blocks that they need for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.engine.preemption import cheapest_victim
from shardline.engine.schedule_state import ScheduleState
from shardline.engine.sequence import LiveSequence, State
from shardline.messages.step import SequenceStart, SequenceStep
from shardline.models.kv_groups import blocks_per_request

STEPS_BETWEEN_LOOKUPS = 16
"""How often a sequence that lacks blocks looks its prefix up again; a look-up costs O(prompt)."""


@dataclass
class Draft:
    """A plan in the making."""

    step_id: int
    budget: int
    """Tokens that the plan may still take."""
    now: float
    spare: int = 0
    """Guesses that the plan may still take."""
    starts: list[SequenceStart] = field(default_factory=list)
    steps: list[SequenceStep] = field(default_factory=list)
    sequences: list[LiveSequence] = field(default_factory=list)
    """The sequences of `steps`."""
    preempted: bool = False


class Placer:
    """Starts sequences and places their steps. It preempts sequences if there are too few blocks."""

    def __init__(self, state: ScheduleState) -> None:
        self.state = state

    def place(self, draft: Draft, sequence: LiveSequence, num_tokens: int, guesses: Sequence[int] = ()) -> None:
        """Step a running sequence by up to `num_tokens`; by fewer, or not at all, if there are too few blocks.

        `guesses` of the tokens behind its last one are computed with that one, as far as there are blocks for them.
        """
        if sequence.state is not State.RUNNING:
            return
        kv = self.state.kv
        start = sequence.num_scheduled
        reach = kv.reach(sequence)
        if reach <= start:
            if not self._make_room(draft, sequence):
                return
            reach = kv.reach(sequence)
        end = min(start + num_tokens, reach)
        if sequence.awaits_mask and end == sequence.num_tokens:
            end -= 1  # the last token is computed with the step that samples
            if end == start:
                return
        guessed = list(guesses[: reach - end])
        tokens = sequence.tokens
        token_id = tokens[start] if start < len(tokens) else -1
        sample = end == sequence.num_tokens
        score = sequence.is_scored(start, end)
        blocks = kv.grow_tables(sequence, end + len(guessed))
        count = end - start + len(guessed)
        allowed = b""
        if sample and sequence.allowed:
            allowed, sequence.allowed, sequence.awaits_mask = sequence.allowed, b"", True
        draft.steps.append(
            SequenceStep(sequence.seq_id, start, count, blocks, token_id, sample, score, guessed, allowed)
        )
        draft.sequences.append(sequence)
        draft.budget -= count
        draft.spare -= len(guessed)
        sequence.num_scheduled = end
        sequence.num_pending += sample
        sequence.num_in_flight += 1
        sequence.last_step = draft.step_id
        kv.publish_blocks(sequence)

    def start(self, draft: Draft, sequence: LiveSequence) -> bool:
        """Start a waiting sequence, if there is room for all of its tokens and for every running one to grow.

        Otherwise it would soon be preempted, or preempt another one. If no other sequence has blocks, it always starts.
        No other prompt needs room: while one uses up the budget, this method is not called.
        """
        state, queues, kv = self.state, self.state.queues, self.state.kv
        room = kv.pool.num_free
        others_have_blocks = bool(queues.running or queues.draining)
        if others_have_blocks and sequence.blocks_wanted > room and draft.step_id < sequence.next_lookup:
            return False
        hit = kv.lookup_prefix(sequence)
        sequence.next_lookup = draft.step_id + STEPS_BETWEEN_LOOKUPS
        start_blocks = blocks_per_request(state.groups, len(sequence.tokens), state.block_size, state.budget)
        spare = len(state.groups) * len(queues.running)
        sequence.blocks_wanted = start_blocks - hit.num_blocks + hit.num_free + spare
        if others_have_blocks and sequence.blocks_wanted > room:
            return False
        queues.start(sequence)
        kv.share_prefix(sequence, hit)
        sequence.begin_run(state.num_starts, hit.num_tokens)
        sequence.recorder.note_start(draft.now)
        state.registry.count_start(sequence, hit.num_tokens)
        state.num_starts += 1
        draft.starts.append(_start_message(sequence))
        self.place(draft, sequence, min(draft.budget, sequence.num_uncomputed))
        assert draft.sequences[-1] is sequence, "a sequence was started without room for it"
        return True

    def _make_room(self, draft: Draft, needy: LiveSequence) -> bool:
        """Preempt until each group can get one more block; False: that is impossible before further results."""
        state, queues, kv = self.state, self.state.queues, self.state.kv
        while kv.pool.num_free < len(state.groups):
            if queues.draining:
                return False
            victim = cheapest_victim(queues.running, needy, kv.recompute_cost)
            if victim is None:
                return False
            draft.preempted = True
            cost = kv.recompute_cost(victim)
            state.preemptions.record(victim, cost)
            victim.recorder.note_preemption(cost, draft.now)
            queues.leave(victim, State.PREEMPTED)
            if victim is needy:
                return False
        return True


def _start_message(sequence: LiveSequence) -> SequenceStart:
    """What workers must know of a sequence before its first step."""
    request, constraints = sequence.request, sequence.request.constraints
    if constraints is not None and constraints.grammar:
        constraints = msgspec.structs.replace(constraints, grammar="")
    return SequenceStart(
        sequence.seq_id,
        list(sequence.tokens),
        len(request.prompt_token_ids),
        request.sampling,
        request.choice,
        request.eos_token_ids,
        constraints,
    )
