"""Which sequences compute which tokens in the next step."""

from __future__ import annotations

from collections.abc import Iterable

from shardline.engine.placing import Draft, Placer
from shardline.engine.schedule_state import ScheduleState
from shardline.engine.sequence import LiveSequence, State
from shardline.engine.step_results import ResultApplier
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.messages.step import StepPlan, StepResult

MIN_PREFILL_TOKENS = 128
"""A pipeline's prefill is not cut finer than this to keep its stages busy: tiny steps cost more than they overlap."""

MOST_WITH_GUESSES = 48
"""Sampled tokens of a step from which further guesses cost a CPU more than they gain (benchmarks/speculation.py)."""


class Scheduler:
    """Continuous batching with chunked prefill over a paged KV cache.

    It only decides: it never waits, and uses no clock and no tensor. The caller may say what time it is (`now`, in
    seconds of any clock), for the timelines of sequences; no decision depends on it.

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
    * `draft` follows the sequence's last token, and only if no other plan in flight steps the sequence. The result has
      one token more than it accepts, and the next step begins with that token.
    * `token_id` is the token at `start` if the scheduler knows it, else -1.
    * `allowed` is set in steps that sample if the sequence has a grammar. No other plan in flight steps it then.

    `last_token_known=True` is for drafts, and for pipelines, whose first stage never sees what the last one samples. A
    sequence whose next token is unknown is not stepped, so plans in flight decode disjoint sets of sequences, each
    about 1 / max_in_flight of all. Generated tokens are stepped one at a time, with a draft behind the last one, so
    that `token_id` names every one of them.
    `last_token_known=False` is for workers that keep what they sample. A step may start from a token that a plan in
    flight will sample (-1). A stop is then noticed late, and the surplus results are dropped. In both modes consecutive
    prefill chunks of one sequence may be in flight, and no sequence is stepped beyond its length limit.

    A block returns to the pool when no plan in flight reads or writes it.
    """

    def __init__(
        self,
        state: ScheduleState,
        *,
        max_in_flight: int = 1,
        last_token_known: bool,
        placer: Placer | None = None,
        applier: ResultApplier | None = None,
    ) -> None:
        """`placer` and `applier` do the work on single sequences; simulations have faster ones."""
        assert last_token_known or state.drafter is None, "a draft follows tokens that are known"
        self.state = state
        self.max_in_flight = max_in_flight
        self.last_token_known = last_token_known
        self._placer = placer or Placer(state)
        self._applier = applier or ResultApplier(state)

    def add_request(self, request: Request, now: float = 0.0) -> LiveSequence | None:
        """Queue a request. None: it can never run, and the next `take_outputs` has an error for it.

        If it has a grammar, it waits until `state.queues.give_mask` was called for its sequence.
        """
        sequence = self.state.registry.add_request(request)
        if sequence is not None:
            sequence.recorder.added = now
            self.state.queues.add(sequence)
        return sequence

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End all choices of these requests; `take_outputs` has their last outputs. Unknown ids are ignored."""
        for sequence in self.state.registry.find_sequences(request_ids):
            self.state.queues.leave(sequence, State.FINISHED)
            self.state.registry.finish_sequence(sequence, "abort")

    def take_outputs(self) -> list[SequenceOutput]:
        """Outputs that belong to no step: errors and aborts since the last call of this method or of `update`."""
        return self.state.registry.take_outputs()

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not had their last output."""
        return self.state.registry.num_live

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, a plan in flight or an output not taken."""
        return self.state.registry.num_live > 0 or bool(self.state.in_flight) or self.state.registry.has_outputs

    def stats(self) -> EngineStats:
        """Counters and gauges; the engine loop fills in `engine_seconds`."""
        state, totals = self.state, self.state.registry.totals
        return EngineStats(
            num_running=len(state.queues.running),
            num_waiting=state.registry.num_live - len(state.queues.running),
            kv_blocks_total=state.kv.pool.num_usable,
            kv_blocks_used=state.kv.pool.num_used,
            num_steps=state.num_steps - len(state.in_flight),
            num_preemptions=state.preemptions.count,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            step_seconds=totals.step_seconds,
            drafts=None if state.drafter is None else state.drafter.stats(),
        )

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next plan; None if nothing can run, or not before another result has come.

        If a request is unfinished and no plan is in flight, there is always a plan, unless all sequences await masks.
        """
        if len(self.state.in_flight) >= self.max_in_flight:
            return None
        draft = Draft(self.state.num_steps, self.state.budget, now)
        prefills = self._schedule_decodes(draft)
        self._schedule_prefills(draft, prefills)
        if not draft.steps:
            return None
        plan = StepPlan(draft.step_id, draft.starts, draft.steps, self.state.queues.take_ends())
        self.state.launch(plan, draft.sequences, now)
        return plan

    def schedule_idle(self) -> StepPlan:
        """An empty plan, for a step that only other replicas need; its result must be passed to `update` too."""
        assert len(self.state.in_flight) < self.max_in_flight, "too many plans are in flight"
        plan = StepPlan(self.state.num_steps, [], [], self.state.queues.take_ends())
        self.state.launch(plan, [], 0.0)
        return plan

    def update(self, plan: StepPlan, step_result: StepResult, now: float = 0.0) -> list[SequenceOutput]:
        """Apply the result of the oldest plan in flight; returns outputs of the sequences that got tokens or ended."""
        flying, sequences, planned = self.state.in_flight.popleft()
        assert flying.step_id == plan.step_id == step_result.step_id, "results must come in the order of their plans"
        self.state.registry.totals.step_seconds += step_result.seconds
        outputs = self.state.registry.take_outputs()
        results = {entry.seq_id: entry for entry in step_result.results}
        for sequence, step in zip(sequences, flying.steps, strict=True):
            output = self._applier.apply(sequence, step, results.get(step.seq_id), planned, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _schedule_decodes(self, draft: Draft) -> list[LiveSequence]:
        """Step the sequences that have one token to compute, in a pipeline a share of them; returns all others."""
        decodes: list[LiveSequence] = []
        prefills: list[LiveSequence] = []
        for sequence in self.state.queues.running:
            if sequence.awaits_mask and sequence.num_uncomputed == 1:
                continue
            (decodes if sequence.num_uncomputed == 1 else prefills).append(sequence)
        share = len(decodes)
        if self.last_token_known:
            share = -(-share // self.max_in_flight)
            decodes = [sequence for sequence in decodes if sequence.num_pending == 0]
            # The sequence that waited longest goes first, so that none waits for ever.
            decodes.sort(key=lambda sequence: sequence.last_step)
        # Every sequence that may be in the plan can sample a token before others have guesses.
        samples = min(self.state.registry.num_live, self.state.max_running)
        draft.spare = min(min(self.state.max_samples, MOST_WITH_GUESSES) - samples, draft.budget - share)
        for sequence in decodes:
            if len(draft.steps) == share:
                break
            # If the pending token is the last one that the limit allows, there is nothing left to compute.
            if sequence.num_pending == 0 or sequence.num_tokens < sequence.limit:
                self._placer.place(draft, sequence, 1, self._guess(draft, sequence, share - len(draft.steps)))
        return prefills

    def _guess(self, draft: Draft, sequence: LiveSequence, num_left: int) -> list[int]:
        """A draft for the next of `num_left` sequences, which get equal shares, if its tokens are known."""
        drafter = self.state.drafter
        return [] if drafter is None or sequence.num_pending else drafter.propose(sequence, draft.spare // num_left)

    def _schedule_prefills(self, draft: Draft, prefills: list[LiveSequence]) -> None:
        """Fill the plan with chunks of prompts: first those of running sequences, then those of waiting ones."""
        state, waiting = self.state, self.state.queues.waiting
        if self.last_token_known and (prefills or waiting):
            unscheduled = sum(sequence.num_uncomputed for sequence in prefills) + waiting.num_tokens
            share = -(-unscheduled // (self.max_in_flight - len(state.in_flight)))
            draft.budget = min(draft.budget, max(share, MIN_PREFILL_TOKENS))
        for sequence in prefills:
            if draft.budget == 0:
                return
            generated = sequence.num_scheduled >= sequence.num_start_tokens
            most = 1 if generated and self.last_token_known else draft.budget
            self._placer.place(draft, sequence, min(most, sequence.num_uncomputed))
        while draft.budget > 0 and not draft.preempted and len(state.queues.running) < state.max_running:
            sequence_or_none = waiting.peek()
            if sequence_or_none is None or not self._placer.start(draft, sequence_or_none):
                return
