"""A plan in the making: it starts sequences, places their steps, and gives them the blocks that they need for these."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.engine.kv_cache import KVCache
from shardline.engine.scheduling.preemption import PreemptionLog, make_room
from shardline.engine.scheduling.queues import SequenceQueues
from shardline.engine.scheduling.registry import RequestRegistry
from shardline.engine.scheduling.sequence import LiveSequence, State
from shardline.messages.step import SequenceStart, SequenceStep, StepPlan

STEPS_BETWEEN_LOOKUPS = 16
"""How often a sequence that lacks blocks looks its prefix up again; a look-up costs O(prompt)."""


class PlanBuilder:
    """Builds one plan after another. It preempts sequences if there are too few blocks."""

    def __init__(
        self,
        kv: KVCache,
        queues: SequenceQueues,
        registry: RequestRegistry,
        preemptions: PreemptionLog,
        max_tokens: int,
        max_prefill_tokens: int = 0,
    ) -> None:
        """`max_tokens`: the most tokens of a plan; `max_prefill_tokens`: of one prompt in it, 0: of a plan."""
        self._kv = kv
        self._queues = queues
        self._registry = registry
        self._preemptions = preemptions
        self._max_tokens = max_tokens
        self._max_prefill_tokens = max_prefill_tokens or max_tokens
        self._num_starts = 0
        self.begin(0, 0.0)

    def begin(self, step_id: int, now: float) -> None:
        """Begin the plan with this id, at this time in seconds of the scheduler's clock."""
        self.step_id, self.now = step_id, now
        self.budget = self._max_tokens
        """Tokens that the plan may still take."""
        self.draft_budget = 0
        """Draft tokens that the plan may still take."""
        self.starts: list[SequenceStart] = []
        self.steps: list[SequenceStep] = []
        self.sequences: list[LiveSequence] = []
        """The sequences of `steps`."""
        self.has_preempted = False

    def finish(self) -> StepPlan:
        """The plan."""
        traffic = self._kv.traffic
        copies = None if traffic is None else traffic.take_copies(self.step_id)
        return StepPlan(self.step_id, self.starts, self.steps, self._queues.take_ends(), copies)

    def place(
        self, sequence: LiveSequence, num_tokens: int, draft_token_ids: Sequence[int] = (), num_guesses: int = 0
    ) -> None:
        """Step a running sequence by up to `num_tokens`; by fewer, or not at all, if there are too few blocks.

        A draft of the tokens behind its last one is computed with that one, as far as there are blocks for it.
        `num_guesses`: see `SequenceStep`.
        """
        if sequence.state is not State.RUNNING:
            return
        kv = self._kv
        start = sequence.num_scheduled
        reach = kv.reach(sequence)
        if reach <= start:
            count = self._preemptions.count
            has_room = make_room(sequence, self._queues, kv, self._preemptions, self.now)
            self.has_preempted |= self._preemptions.count > count
            if not has_room:
                return
            reach = kv.reach(sequence)
        end = min(start + num_tokens, reach)
        if sequence.awaits_mask and end == sequence.num_tokens:
            end -= 1  # the last token is computed with the step that samples
            if end == start:
                return
        draft = list(draft_token_ids[: reach - end])
        tokens = sequence.tokens
        token_id = tokens[start] if start < len(tokens) else -1
        sample = end == sequence.num_tokens
        score = sequence.report is not None and sequence.report.asks(start, end)
        blocks = kv.grow_tables(sequence, end + len(draft))
        count = end - start + len(draft)
        allowed = b""
        if sample and sequence.allowed:
            num_words = len(sequence.allowed) // (1 + len(sequence.foreseen))
            allowed = sequence.allowed[: num_words * (1 + len(draft))]
            sequence.allowed, sequence.foreseen, sequence.awaits_mask = b"", [], True
        step = SequenceStep(sequence.seq_id, start, count, blocks, token_id, sample, score, draft, allowed, num_guesses)
        self.draft_budget -= len(draft)
        sequence.awaits_draft = bool(draft)
        self.add(sequence, step, end)
        kv.publish_blocks(sequence)

    def place_prefill(self, sequence: LiveSequence, most: int) -> None:
        """Step a sequence by as many tokens as the plan takes, and by up to `most`."""
        self.place(sequence, min(self.budget, most, self._max_prefill_tokens, sequence.num_uncomputed))

    def add(self, sequence: LiveSequence, step: SequenceStep, end: int) -> None:
        """Add a step of a running sequence that has the blocks for it; `end`: where its known tokens end."""
        self.steps.append(step)
        self.sequences.append(sequence)
        self.budget -= step.num_tokens
        sequence.num_scheduled = end
        sequence.num_pending += step.sample
        sequence.num_in_flight += 1
        sequence.last_step = self.step_id

    def start(self, sequence: LiveSequence) -> bool:
        """Start a waiting sequence, or fetch blocks of its prefix, if there is room for all of its tokens and for every
        running one to grow.

        Otherwise it would soon be preempted, or preempt another one. If nothing else has blocks, it always starts.
        Another prompt needs room only if it waits for its next step by `max_prefill_tokens`: while one uses up the
        budget, this method is not called.
        """
        queues, kv = self._queues, self._kv
        room = kv.pool.num_free
        others_have_blocks = bool(queues.running or queues.draining or kv.is_fetching)
        if others_have_blocks and sequence.blocks_wanted > room and self.step_id < sequence.next_lookup:
            return False
        hit = kv.lookup_prefix(sequence)
        sequence.next_lookup = self.step_id + STEPS_BETWEEN_LOOKUPS
        spare = kv.num_groups * len(queues.running) * kv.pool.num_ranks
        if self._max_prefill_tokens < self._max_tokens:
            spare += sum(kv.blocks_ahead(other, self._max_tokens) for other in queues.running)
        needed = kv.blocks_of_request(len(sequence.tokens), self._max_tokens)
        sequence.blocks_wanted = needed - hit.num_blocks + hit.num_free + spare
        if others_have_blocks and sequence.blocks_wanted > room:
            return False
        if hit.absent:
            ticket = kv.fetch_prefix(sequence, hit)
            if ticket is None:
                return self.start(sequence)  # with what the pool has
            queues.fetch(sequence, ticket)
            return True
        queues.start(sequence)
        kv.share_prefix(sequence, hit)
        sequence.begin_run(self._num_starts, hit.num_tokens)
        sequence.recorder.note_start(self.now)
        self._registry.count_start(sequence, hit.num_tokens)
        self._num_starts += 1
        self.starts.append(_start_message(sequence))
        self.place_prefill(sequence, self.budget)
        assert self.sequences[-1] is sequence, "a sequence was started without room for it"
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
        request.embeds,
        sequence.adapter_slot,
    )
