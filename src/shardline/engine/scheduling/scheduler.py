"""Which sequences compute which tokens in the next step, and what its result means for them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shardline.deployment.deployment import CachePlan, StepLimits
from shardline.engine.kv_cache import KVCache
from shardline.engine.scheduling.plan_builder import PlanBuilder
from shardline.engine.scheduling.preemption import PreemptionLog
from shardline.engine.scheduling.queues import SequenceQueues
from shardline.engine.scheduling.registry import RequestRegistry
from shardline.engine.scheduling.sequence import LiveSequence, State
from shardline.engine.speculative.proposer import Drafting, Proposer, make_proposer
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import STEP_TOKEN_BOUNDS, EngineStats
from shardline.messages.step import SequenceResult, SequenceStep, StepPlan, StepResult

_PARTS = 4
"""Steps of each stage over which it spreads what it has to prefill. All other stages wait for a step that is longer."""


class PlanInFlight(NamedTuple):
    """A plan that is not updated yet."""

    plan: StepPlan
    sequences: list[LiveSequence]
    """Those of the plan's steps, in the same order."""
    planned: float
    """When it was scheduled."""


class Scheduler:
    """Continuous batching with chunked prefill over a paged KV cache.

    It only decides: it never waits, and uses no clock and no tensor. The caller may say what time it is (`now`, in
    seconds of any clock), for the timelines of sequences; no decision depends on it but how much is drafted.

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
    * `draft_token_ids` follow the last token, and only if no other plan in flight steps the sequence. The result has
      one token more than it accepts, and the next step begins with that token.
    * `num_guesses` is only in steps that decode. The result has up to as many `guesses`, and a later plan drafts them.
    * `token_id` is the token at `start` if the scheduler knows it, else -1.
    * `copies` come before anything that the plan computes. What they store was computed by earlier plans, and what they
      fetch is read by plans that are scheduled after its result.
    * `allowed` is set in steps that sample if the sequence has a grammar. No other plan in flight steps it then.

    `last_token_known=True` is for pipelines, whose first stage never sees what the last one samples. A sequence whose
    next token is unknown is not stepped, so plans in flight decode disjoint sets of sequences, each about 1 /
    max_in_flight of all. Generated tokens are stepped one at a time, with a draft behind the last one, so that
    `token_id` names every one of them.
    `last_token_known=False` is for workers that keep what they sample. A step may start from a token that a plan in
    flight will sample (-1), unless that plan has a draft of the sequence; see `awaits_tokens`. A stop is then noticed
    late, and the surplus results are dropped. In both modes consecutive prefill chunks of one sequence may be in
    flight, and no sequence is stepped beyond its length limit.

    A block returns to the pool when no plan in flight reads or writes it. If a tier has a part of a sequence's prefix,
    the sequence starts after the plans that fetch this part.
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
        namespace: bytes | None = None,
        proposer: Proposer | None = None,
        warns: bool = True,
    ) -> None:
        """`num_blocks` includes the null block; `namespace`: see `KVCache`; `proposer`: None: as `limits` say; `warns`:
        whether preemptions are logged."""
        self.max_in_flight = max_in_flight
        self.last_token_known = last_token_known
        # The budget has a token for every running sequence, so a decode never waits for another one.
        self.max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self.max_samples = limits.max_samples
        self._keeps_states = limits.keeps_states
        proposer = proposer or make_proposer(limits.speculation)
        self.drafting = None if proposer is None else Drafting(proposer)
        """None: nothing has been drafted yet."""
        self.kv = KVCache(
            cache.groups,
            num_blocks,
            cache.block_size,
            prefix_caching=cache.prefix_caching,
            namespace=namespace,
            context=cache.context,
        )
        self.registry = RequestRegistry(self.kv, max_model_len=max_model_len)
        self.queues = SequenceQueues(self.kv)
        self.in_flight: deque[PlanInFlight] = deque()
        self.num_steps = 0
        """Plans so far, the empty ones included."""
        self._updated = 0.0
        """When the last result came."""
        self._step_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.preemptions = PreemptionLog(warns=warns)
        self._max_prefill_tokens = limits.max_prefill_tokens
        self._least_share = limits.least_prefill_share
        self._max_tokens = limits.max_num_batched_tokens
        self._builder = self._make_builder(limits.max_num_batched_tokens)

    def _make_builder(self, max_tokens: int) -> PlanBuilder:
        return PlanBuilder(self.kv, self.queues, self.registry, self.preemptions, max_tokens, self._max_prefill_tokens)

    def add_request(self, request: Request, now: float = 0.0) -> LiveSequence | None:
        """Queue a request. None: it can never run, and the next `take_outputs` has an error for it.

        If it has a grammar, it waits until `queues.give_mask` was called for its sequence.
        """
        sequence = self.registry.add_request(request)
        if sequence is not None:
            if self.drafting is None and sequence.expects:
                self.drafting = Drafting(None)
            sequence.recorder.added = now
            self.queues.add(sequence)
        return sequence

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End all choices of these requests; `take_outputs` has their last outputs. Unknown ids are ignored."""
        for sequence in self.registry.find_sequences(request_ids):
            self.queues.leave(sequence, State.FINISHED)
            self.registry.finish_sequence(sequence, "abort")
            if self.drafting is not None:  # the front aborts what reaches a stop string
                self.drafting.note_end(sequence)

    def foresee(self, sequence: LiveSequence, result: SequenceResult, most: int) -> list[int]:
        """See `Drafting.foresee`."""
        return [] if self.drafting is None else self.drafting.foresee(sequence, result, most)

    def take_outputs(self) -> list[SequenceOutput]:
        """Outputs that belong to no step: errors and aborts since the last call of this method or of `update`."""
        return self.registry.take_outputs()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, a plan in flight, a block to be fetched or an output not taken."""
        registry = self.registry
        return bool(registry.num_live or self.in_flight or self.kv.is_fetching or registry.has_outputs)

    def stats(self) -> EngineStats:
        """Counters and gauges; the engine loop fills in `engine_seconds`."""
        totals, num_running = self.registry.totals, len(self.queues.running)
        return EngineStats(
            num_running=num_running,
            num_waiting=self.registry.num_live - num_running,
            kv_blocks_total=self.kv.pool.num_usable,
            kv_blocks_used=self.kv.pool.num_used,
            num_steps=self.num_steps - len(self.in_flight),
            num_preemptions=self.preemptions.count,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            step_seconds=totals.step_seconds,
            drafts=None if self.drafting is None else self.drafting.stats(),
            step_tokens=list(self._step_tokens),
        )

    @property
    def awaits_tokens(self) -> bool:
        """Whether the next plan may have drafts once the results of those in flight are known. Sequences with a draft
        in flight are in no plan before that, so a batch would fall apart."""
        if self.drafting is None or self.last_token_known:
            return False
        return self.drafting.awaits_tokens(self.queues.running)

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next plan; None if nothing can run, or not before another result has come.

        If a request is unfinished and no plan is in flight, there is always a plan, unless all sequences await masks.
        """
        if len(self.in_flight) >= self.max_in_flight:
            return None
        builder = self._builder
        builder.begin(self.num_steps, now)
        prefills = self._schedule_decodes()
        self._schedule_prefills(prefills)
        if self.drafting is not None and len(self.queues.running) == len(builder.steps) == 1:
            limit = self.max_samples - 1
            builder.steps[0] = self.drafting.ask_with_prompt(builder.sequences[0], builder.steps[0], limit)
        has_copies = self.kv.traffic is not None and self.kv.traffic.has_copies
        return self._launch() if builder.steps or has_copies else None

    def schedule_idle(self) -> StepPlan:
        """An empty plan, for a step that only other replicas need; its result must be passed to `update` too."""
        assert len(self.in_flight) < self.max_in_flight, "too many plans are in flight"
        self._builder.begin(self.num_steps, 0.0)
        return self._launch()

    def update(self, plan: StepPlan, step_result: StepResult, now: float = 0.0) -> list[SequenceOutput]:
        """Apply the result of the oldest plan in flight; returns outputs of the sequences that got tokens or ended."""
        flying, sequences, planned = self.in_flight.popleft()
        assert flying.step_id == plan.step_id == step_result.step_id, "results must come in the order of their plans"
        self.registry.totals.step_seconds += step_result.seconds
        if flying.copies is not None:
            assert self.kv.traffic is not None
            assert step_result.copied is not None, "every rank must say what came of its copies"
            self.queues.end_fetches(self.kv.traffic.finish_plan(flying.step_id, step_result.copied))
        outputs = self.registry.take_outputs()
        tokens_before = self.registry.totals.tokens
        results = {entry.seq_id: entry for entry in step_result.results}
        for sequence, step in zip(sequences, flying.steps, strict=True):
            output = self._apply(sequence, step, results.get(step.seq_id), planned, now)
            if output is not None:
                outputs.append(output)
        if self.drafting is not None:
            self.drafting.note_step(flying, step_result.results, now - self._updated or step_result.seconds)
        self._updated = now
        num_tokens = self.registry.totals.tokens - tokens_before
        if num_tokens:
            self._step_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        return outputs

    def _launch(self) -> StepPlan:
        """The builder's plan, which is in flight from now on."""
        builder = self._builder
        plan = builder.finish()
        self.num_steps += 1
        self.in_flight.append(PlanInFlight(plan, builder.sequences, builder.now))
        return plan

    def _schedule_decodes(self) -> list[LiveSequence]:
        """Step the sequences that have one token to compute, in a pipeline a share of them; returns all others."""
        decodes: list[LiveSequence] = []
        prefills: list[LiveSequence] = []
        for sequence in self.queues.running:
            if (sequence.awaits_mask and sequence.num_uncomputed == 1) or sequence.awaits_draft:
                continue
            (decodes if sequence.num_uncomputed == 1 else prefills).append(sequence)
        share = len(decodes)
        if self.last_token_known:
            share = -(-share // self.max_in_flight)
            decodes = [sequence for sequence in decodes if sequence.num_pending == 0]
            # The sequence that waited longest goes first, so that none waits for ever.
            decodes.sort(key=lambda sequence: sequence.last_step)
        builder = self._builder
        # Every sequence that may be in the plan can sample a token before others have drafts.
        samples = min(self.registry.num_live, self.max_running)
        builder.draft_budget = min(self.max_samples - samples, builder.budget - share)
        drafting = self.drafting
        if drafting is not None:
            drafting.begin_plan(max(1, share))
        for sequence in decodes:
            if len(builder.steps) == share:
                break
            # If the pending token is the last one that the limit allows, there is nothing left to compute.
            if sequence.num_pending == 0 or sequence.num_tokens < sequence.limit:
                if drafting is None or (drafting.rests and not sequence.has_own_draft):
                    builder.place(sequence, 1)
                    continue
                # Those that are left have equal shares of the room for drafts.
                draft = drafting.propose(sequence, builder.draft_budget // (share - len(builder.steps)))
                room = min(self.max_samples, self._max_tokens) - max(share, samples)
                builder.place(sequence, 1, draft, drafting.count_guesses(sequence, max(0, room) // share))
        return prefills

    def _schedule_prefills(self, prefills: list[LiveSequence]) -> None:
        """Fill the plan with chunks of prompts: first those of running sequences, then those of waiting ones."""
        builder, queues, waiting = self._builder, self.queues, self.queues.waiting
        if self.last_token_known and (prefills or waiting):
            unscheduled = sum(sequence.num_uncomputed for sequence in prefills) + waiting.num_tokens
            share = -(-unscheduled // (_PARTS * self.max_in_flight))
            builder.budget = min(builder.budget, max(share, self._least_share))
        for sequence in prefills:
            if builder.budget == 0:
                return
            generated = sequence.num_scheduled >= sequence.num_start_tokens
            most = 1 if generated and self.last_token_known else builder.budget
            builder.place_prefill(sequence, most)
        while builder.budget > 0 and not builder.has_preempted:
            leaving = len(queues.draining) if self._keeps_states else 0
            if len(queues.running) + len(queues.fetching) + leaving >= self.max_running:
                return
            sequence_or_none = waiting.peek()
            if sequence_or_none is None or not builder.start(sequence_or_none):
                return

    def _apply(
        self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult | None, planned: float, now: float
    ) -> SequenceOutput | None:
        """Apply a collected step, which was planned at `planned`, to its sequence; returns what the front gets."""
        output = None
        sequence.num_in_flight -= 1
        sequence.num_computed = step.start + step.num_tokens - len(step.draft_token_ids)
        if step.draft_token_ids:
            sequence.awaits_draft = False
        if step.sample and result is not None and not result.error:
            if step.draft_token_ids:
                # The step has computed the keys and values of the accepted tokens, too.
                sequence.num_computed += len(result.token_ids) - 1
                sequence.num_scheduled += len(result.token_ids) - 1
                sequence.recorder.num_guessing_steps += 1
                sequence.recorder.num_guesses += len(step.draft_token_ids)
                sequence.recorder.num_right_guesses += len(result.token_ids) - 1
            if self.drafting is not None:
                self.drafting.note_result(sequence, step, result)
        if step.start < sequence.num_start_tokens:
            sequence.recorder.note_chunk(step.start, step.num_tokens, planned, now)
        if step.sample:
            sequence.num_pending -= 1
        if sequence.state is not State.FINISHED:
            self.kv.slide_windows(sequence)
            if result is not None and sequence.report is not None:
                sequence.report.note_result(step, result)
            if step.sample or (result is not None and result.error):
                assert result is not None
                output = self._take_result(sequence, result, now)
        self.queues.release(sequence)
        return output

    def _take_result(self, sequence: LiveSequence, result: SequenceResult, now: float) -> SequenceOutput:
        if result.error:
            self.queues.leave(sequence, State.FINISHED)
            return self.registry.end_sequence(sequence, "error", result.error, refused=result.refused)
        if result.embedding:
            self.queues.leave(sequence, State.FINISHED)
            return self.registry.finish_embedding(sequence, result.embedding)
        assert result.token_ids, "a step that samples must have a token"
        several = len(result.token_ids) > 1
        assert not (several and sequence.num_in_flight), "several tokens came while a later step was in flight"
        output = self.registry.take_result(sequence, result)
        self.kv.publish_blocks(sequence)
        recorder = sequence.recorder
        if recorder.awaits_token:
            recorder.note_token(now, running=sequence.state is State.RUNNING)
            output = msgspec.structs.replace(output, timeline=recorder.timeline())
        if output.finish_reason is not None:
            if recorder.num_guesses:
                output = msgspec.structs.replace(output, timeline=recorder.timeline())
            self.queues.leave(sequence, State.FINISHED)
            if self.drafting is not None:
                self.drafting.note_end(sequence)
        return output
