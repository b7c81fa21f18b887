"""Which sequences compute which tokens in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from shardline.deployment.deployment import CachePlan, StepLimits
from shardline.engine.kv_cache import KVCache
from shardline.engine.preemption import PreemptionLog, cheapest_victim
from shardline.engine.queues import SequenceQueues
from shardline.engine.registry import RequestRegistry
from shardline.engine.sequence import LiveSequence, State
from shardline.models.kv_groups import blocks_per_request
from shardline.stats import EngineStats
from shardline.types import Request, SequenceOutput, SequenceResult, SequenceStart, SequenceStep, StepPlan, StepResult

MIN_PREFILL_TOKENS = 128
"""A pipeline's prefill is not cut finer than this to keep its stages busy: tiny steps cost more than they overlap."""

STEPS_BETWEEN_LOOKUPS = 16
"""How often a sequence that lacks blocks looks its prefix up again; a look-up costs O(prompt)."""


@dataclass
class Draft:
    """A plan in the making."""

    step_id: int
    budget: int
    now: float
    starts: list[SequenceStart] = field(default_factory=list)
    steps: list[SequenceStep] = field(default_factory=list)
    sequences: list[LiveSequence] = field(default_factory=list)
    """The sequences of `steps`."""
    preempted: bool = False


class Scheduler:
    """Continuous batching with chunked prefill over a paged KV cache. It only decides: it never waits, and uses no
    clock and no tensor. The caller may say what time it is (`now`, in seconds of any clock), for the timelines of
    sequences; no decision depends on it.

    The caller's loop, with at most `max_in_flight` plans scheduled and not yet updated, updates in plan order:

        plan = scheduler.schedule()  ->  run it  ->  outputs = scheduler.update(plan, result)

    Every scheduled plan must be run, by workers that run plans in the order of their `step_id`. If one cannot be run,
    the scheduler cannot be used any more. Workers may rely on this:

    * The first plan that steps a sequence has it in `starts`, with all tokens known then; its `seq_id` is new, also
      after a preemption. A `seq_id` is in `ends` once, when no plan that steps it is in flight.
    * The steps of a sequence are consecutive: each begins where the previous one ended. `new_blocks` extend each
      group's block table so that it covers the step's last token; NULL_BLOCK entries lie before the group's window. A
      step may read what its own plan or an earlier one writes for another sequence: layers store the keys and values of
      all tokens of a step before they attend.
    * `score` is set if the request wants log probabilities that the step's logits tell: the result then has them.
    * `sample` is set if the step ends with the sequence's last token. The result then has one token for it, or several
      if no other plan in flight steps the sequence (later steps compute the KV of these).
    * `token_id` is the token at `start` if the scheduler knows it, else -1.

    `last_token_known=True` is for pipelines, whose first stage never sees what the last one samples. A sequence whose
    next token is unknown is not stepped, so plans in flight decode disjoint sets of sequences, each about
    1 / max_in_flight of all. Generated tokens are stepped one at a time, so that `token_id` names every one of them.
    `last_token_known=False` is for workers that keep what they sample. A step may start from a token that a plan in
    flight will sample (-1). A stop is then noticed late, and the surplus results are dropped. In both modes consecutive
    prefill chunks of one sequence may be in flight, and no sequence is stepped beyond its length limit.

    A block returns to the pool when no plan in flight reads or writes it.
    """

    def __init__(
        self,
        limits: StepLimits,
        cache: CachePlan,
        num_blocks: int,
        max_model_len: int,
        *,
        max_in_flight: int = 1,
        last_token_known: bool,
        namespace: str = "",
        preemptions: PreemptionLog | None = None,
    ) -> None:
        """`num_blocks` includes the null block. Only sequences of the same `namespace` (weights, adapter) share KV.

        `preemptions` counts and reports preemptions; None: it warns of them.
        """
        self._budget = limits.max_num_batched_tokens
        # The budget has a token for every running sequence, so a decode never waits for another one.
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._groups = cache.groups
        self._block_size = cache.block_size
        self._max_in_flight = max_in_flight
        self._last_token_known = last_token_known
        self._kv = KVCache(
            cache.groups, num_blocks, cache.block_size, prefix_caching=cache.prefix_caching, namespace=namespace
        )
        self._registry = RequestRegistry(
            self._kv, cache.groups, block_size=cache.block_size, max_model_len=max_model_len
        )
        self._queues = SequenceQueues(self._kv)
        self._in_flight: deque[tuple[StepPlan, list[LiveSequence], float]] = deque()
        """Plans that are not updated, their sequences, and when they were scheduled."""
        self._num_starts = 0
        self._num_steps = 0
        self._preemptions = preemptions or PreemptionLog()

    def add_request(self, request: Request, now: float = 0.0) -> None:
        """Queue a request. If it can never run, the next `take_outputs` has an error for it."""
        sequence = self._registry.add_request(request)
        if sequence is not None:
            sequence.recorder.added = now
            self._queues.waiting.push(sequence)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End all choices of these requests; `take_outputs` has their last outputs. Unknown ids are ignored."""
        for sequence in self._registry.find_sequences(request_ids):
            self._queues.leave(sequence, State.FINISHED)
            self._registry.abort_sequence(sequence)

    def take_outputs(self) -> list[SequenceOutput]:
        """Outputs that belong to no step: errors and aborts since the last call of this method or of `update`."""
        return self._registry.take_outputs()

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not had their last output."""
        return self._registry.num_live

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, a plan in flight or an output not taken."""
        return self._registry.num_live > 0 or bool(self._in_flight) or self._registry.has_outputs

    def stats(self) -> EngineStats:
        """Counters and gauges; the engine loop fills in `engine_seconds`."""
        totals = self._registry.totals
        return EngineStats(
            num_running=len(self._queues.running),
            num_waiting=self._registry.num_live - len(self._queues.running),
            kv_blocks_total=self._kv.pool.num_usable,
            kv_blocks_used=self._kv.pool.num_used,
            num_steps=self._num_steps - len(self._in_flight),
            num_preemptions=self._preemptions.count,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            step_seconds=totals.step_seconds,
        )

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next plan; None if nothing can run, or not before another result has come.

        If a request is unfinished and no plan is in flight, there is always a plan.
        """
        if len(self._in_flight) >= self._max_in_flight:
            return None
        draft = Draft(self._num_steps, self._budget, now)
        prefills = self._schedule_decodes(draft)
        self._schedule_prefills(draft, prefills)
        if not draft.steps:
            return None
        plan = StepPlan(draft.step_id, draft.starts, draft.steps, self._queues.take_ends())
        self._num_steps += 1
        self._in_flight.append((plan, draft.sequences, now))
        return plan

    def schedule_idle(self) -> StepPlan:
        """An empty plan, for a step that only other replicas need; its result must be passed to `update` too."""
        assert len(self._in_flight) < self._max_in_flight, "too many plans are in flight"
        plan = StepPlan(self._num_steps, [], [], self._queues.take_ends())
        self._num_steps += 1
        self._in_flight.append((plan, [], 0.0))
        return plan

    def update(self, plan: StepPlan, step_result: StepResult, now: float = 0.0) -> list[SequenceOutput]:
        """Apply the result of the oldest plan in flight; returns outputs of the sequences that got tokens or ended."""
        flying, sequences, planned = self._in_flight.popleft()
        assert flying.step_id == plan.step_id == step_result.step_id, "results must come in the order of their plans"
        self._registry.totals.step_seconds += step_result.seconds
        outputs = self._registry.take_outputs()
        results = {entry.seq_id: entry for entry in step_result.results}
        for sequence, step in zip(sequences, flying.steps, strict=True):
            output = self._apply_step(sequence, step, results.get(step.seq_id), planned, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _apply_step(
        self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult | None, planned: float, now: float
    ) -> SequenceOutput | None:
        """Apply a collected step, which was planned at `planned`, to its sequence; returns what the front gets."""
        output = None
        sequence.num_in_flight -= 1
        sequence.num_computed = step.start + step.num_tokens
        if step.start < sequence.num_start_tokens:
            sequence.recorder.note_chunk(step.start, step.num_tokens, planned, now)
        if step.sample:
            sequence.num_pending -= 1
        if sequence.state is not State.FINISHED:
            self._kv.slide_windows(sequence)
            if step.score and result is not None:
                sequence.append_scores(step.start, result.prompt_logprobs or [])
            if step.sample or (result is not None and result.error):
                assert result is not None
                output = self._take_result(sequence, result, now)
        self._queues.release(sequence)
        return output

    def _take_result(self, sequence: LiveSequence, result: SequenceResult, now: float) -> SequenceOutput:
        if result.error:
            self._queues.leave(sequence, State.FINISHED)
            return self._registry.fail_sequence(sequence, result.error)
        if result.embedding:
            self._queues.leave(sequence, State.FINISHED)
            return self._registry.finish_embedding(sequence, result.embedding)
        assert result.token_ids, "a step that samples must have a token"
        several = len(result.token_ids) > 1
        assert not (several and sequence.num_in_flight), "several tokens came while a later step was in flight"
        output = self._registry.take_result(sequence, result)
        self._kv.publish_blocks(sequence)
        recorder = sequence.recorder
        if recorder.awaits_token:
            recorder.note_token(now, running=sequence.state is State.RUNNING)
            output = msgspec.structs.replace(output, timeline=recorder.timeline())
        if output.finish_reason is not None:
            self._queues.leave(sequence, State.FINISHED)
        return output

    def _schedule_decodes(self, draft: Draft) -> list[LiveSequence]:
        """Step the sequences that have one token to compute, in a pipeline a share of them; returns all others."""
        decodes: list[LiveSequence] = []
        prefills: list[LiveSequence] = []
        for sequence in self._queues.running:
            (decodes if sequence.num_uncomputed == 1 else prefills).append(sequence)
        share = len(decodes)
        if self._last_token_known:
            share = -(-share // self._max_in_flight)
            decodes = [sequence for sequence in decodes if sequence.num_pending == 0]
            # The sequence that waited longest goes first, so that none waits for ever.
            decodes.sort(key=lambda sequence: sequence.last_step)
        for sequence in decodes:
            if len(draft.steps) == share:
                break
            # If the pending token is the last one that the limit allows, there is nothing left to compute.
            if sequence.num_pending == 0 or sequence.num_tokens < sequence.limit:
                self._place(draft, sequence, 1)
        return prefills

    def _schedule_prefills(self, draft: Draft, prefills: list[LiveSequence]) -> None:
        """Fill the plan with chunks of prompts: first those of running sequences, then those of waiting ones."""
        if self._last_token_known and (prefills or self._queues.waiting):
            unscheduled = sum(sequence.num_uncomputed for sequence in prefills) + self._queues.waiting.num_tokens
            share = -(-unscheduled // (self._max_in_flight - len(self._in_flight)))
            draft.budget = min(draft.budget, max(share, MIN_PREFILL_TOKENS))
        for sequence in prefills:
            if draft.budget == 0:
                return
            generated = sequence.num_scheduled >= sequence.num_start_tokens
            most = 1 if generated and self._last_token_known else draft.budget
            self._place(draft, sequence, min(most, sequence.num_uncomputed))
        while draft.budget > 0 and not draft.preempted and len(self._queues.running) < self._max_running:
            sequence_or_none = self._queues.waiting.peek()
            if sequence_or_none is None or not self._start(draft, sequence_or_none):
                return

    def _place(self, draft: Draft, sequence: LiveSequence, num_tokens: int) -> None:
        """Step a running sequence by up to `num_tokens`; by fewer, or not at all, if there are too few blocks."""
        if sequence.state is not State.RUNNING:
            return
        start = sequence.num_scheduled
        end = min(start + num_tokens, self._kv.reach(sequence))
        if end <= start:
            if not self._make_room(draft, sequence):
                return
            end = min(start + num_tokens, self._kv.reach(sequence))
        tokens = sequence.tokens
        token_id = tokens[start] if start < len(tokens) else -1
        sample = end == sequence.num_tokens
        score = sequence.is_scored(start, end)
        blocks = self._kv.grow_tables(sequence, end)
        draft.steps.append(SequenceStep(sequence.seq_id, start, end - start, blocks, token_id, sample, score))
        draft.sequences.append(sequence)
        draft.budget -= end - start
        sequence.num_scheduled = end
        sequence.num_pending += sample
        sequence.num_in_flight += 1
        sequence.last_step = draft.step_id
        self._kv.publish_blocks(sequence)

    def _start(self, draft: Draft, sequence: LiveSequence) -> bool:
        """Start a waiting sequence, if there is room for all of its tokens and for every running one to grow.

        Otherwise it would soon be preempted, or preempt another one. If no other sequence has blocks, it always starts.
        No other prompt needs room: while one uses up the budget, this method is not called.
        """
        room = self._kv.pool.num_free
        others_have_blocks = bool(self._queues.running or self._queues.draining)
        if others_have_blocks and sequence.blocks_wanted > room and draft.step_id < sequence.next_lookup:
            return False
        hit = self._kv.lookup_prefix(sequence)
        sequence.next_lookup = draft.step_id + STEPS_BETWEEN_LOOKUPS
        start_blocks = blocks_per_request(self._groups, len(sequence.tokens), self._block_size, self._budget)
        spare = len(self._groups) * len(self._queues.running)
        sequence.blocks_wanted = start_blocks - hit.num_blocks + hit.num_free + spare
        if others_have_blocks and sequence.blocks_wanted > room:
            return False
        self._queues.start(sequence)
        self._kv.share_prefix(sequence, hit)
        sequence.begin_run(self._num_starts, hit.num_tokens)
        sequence.recorder.note_start(draft.now)
        self._registry.count_start(sequence, hit.num_tokens)
        self._num_starts += 1
        request = sequence.request
        draft.starts.append(
            SequenceStart(
                sequence.seq_id,
                list(sequence.tokens),
                len(request.prompt_token_ids),
                request.sampling,
                request.choice,
                request.eos_token_ids,
                request.constraints,
            )
        )
        self._place(draft, sequence, min(draft.budget, sequence.num_uncomputed))
        assert draft.sequences[-1] is sequence, "a sequence was started without room for it"
        return True

    def _make_room(self, draft: Draft, needy: LiveSequence) -> bool:
        """Preempt until each group can get one more block; False: that is impossible before further results."""
        while self._kv.pool.num_free < len(self._groups):
            if self._queues.draining:
                return False
            victim = cheapest_victim(self._queues.running, needy, self._kv.recompute_cost)
            if victim is None:
                return False
            draft.preempted = True
            cost = self._kv.recompute_cost(victim)
            self._preemptions.record(victim, cost)
            victim.recorder.note_preemption(cost, draft.now)
            self._queues.leave(victim, State.PREEMPTED)
            if victim is needy:
                return False
        return True
