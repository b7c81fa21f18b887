"""StepPlan -> tensors -> forward -> sample -> StepResult, on one rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shardline.messages.step import RankStep, SequenceResult, StepResult
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.features.constraints import ConstraintRows
from shardline.runtime.features.drafts import Drafts, sampled_rows
from shardline.runtime.features.finite import Finite, FiniteChecker
from shardline.runtime.features.pooling import Pooling
from shardline.runtime.features.scores import Scores
from shardline.runtime.kv_store import KVStore
from shardline.runtime.launch import Feature, Launch
from shardline.runtime.machines.base import Backend, Counters, Download, Forward, StepSizes
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.sampling.sampler import Sampled, Sampler, SamplingPlan
from shardline.runtime.sequences import SequenceTable


class PendingStep:
    """A step that was launched and may still run on a device."""

    def __init__(self, download: Download, finish: Callable[[list[Tensor]], StepResult | None]) -> None:
        """`finish` makes the result from the downloaded tensors."""
        self._download = download
        self._finish: Callable[[list[Tensor]], StepResult | None] | None = finish
        self._result: StepResult | None = None

    @property
    def is_over(self) -> bool:
        """Whether the step was over when its launch returned, so that no wait is needed."""
        return self._download.is_immediate

    def wait(self) -> None:
        """Wait until the device has finished the step; may be called from any thread."""
        self._download.wait()

    def result(self) -> StepResult | None:
        """The result of the step, as `Runner.run_step` returns it; waits for it. Call it in the runner's thread, for
        the oldest step first."""
        if self._finish is not None:
            self._result = self._finish(self._download.wait())
            self._finish = None  # only now: a step that failed fails again
        return self._result


class Runner:
    """Runs the steps of one rank in the order in which they were planned; two steps may be in flight on a device.

    Every rank keeps the tokens of all its sequences. The ranks of the last stage append their sampled tokens
    themselves, so the next plan may refer to a token that the engine does not know yet.
    """

    def __init__(
        self,
        backend: Backend,
        stage: DecoderStage,
        groups: RankGroups,
        kv_store: KVStore,
        forward: Forward,
        sizes: StepSizes,
        finite_checker: FiniteChecker | None,
        expert_load: Counters | None = None,
    ) -> None:
        """`forward`: the stage's forward pass, or a `Replay` of it. `expert_load` is published after each launch."""
        self._stage = stage
        self._groups = groups
        self._kv_store = kv_store
        self._forward = forward
        self._sizes = sizes
        self._expert_load = expert_load
        self._sequences = SequenceTable(sizes.num_kv_groups, sizes.max_blocks)
        self._inputs = backend.make_step_inputs(self._sequences, sizes)
        self._in_flight: deque[PendingStep] = deque()
        self._finished = 0.0
        """When the last step finished, by `time.perf_counter`."""
        self._sampler: Sampler | None = None
        self._constraints: ConstraintRows | None = None
        self._features: list[Feature] = []
        if finite_checker is not None:
            self._features.append(Finite(finite_checker))
        if stage.lm_head is not None:
            spans = stage.lm_head.spans
            self._sampler = Sampler(backend.kernels, spans, groups["tensor"], backend.device)
            vocab_size, own_span = max(span.stop for span in spans), spans[groups["tensor"].rank]
            self._constraints = ConstraintRows(vocab_size, own_span, sizes.max_seqs, self._wait_for_oldest)
            self._features += [Drafts(), self._constraints, Scores(stage, self._sampler)]
        if stage.embeds_prompts:
            self._features.append(Pooling())

    def run_step(self, rank_step: RankStep) -> StepResult | None:
        """Run one step. Ranks of the last stage return the sampled tokens; other ranks return None, unless the plan
        fetches blocks."""
        return self.launch_step(rank_step).result()

    @torch.inference_mode()
    def launch_step(self, rank_step: RankStep) -> PendingStep:
        """Launch one step. On the CPU, the step is over when this returns; a device may still run this step and the
        previous one.

        Later steps can use its sampled tokens at once: stand-ins hold their places.
        """
        # A sequence may have at most one unknown token, see `Penalties.uncounted`.
        while len(self._in_flight) > 1:
            self._wait_for_oldest()
        started = time.perf_counter()
        plan = rank_step.plan
        for seq_id in plan.ends:
            self._sequences.end_sequence(seq_id)
        for start in plan.starts:
            mask = None if self._constraints is None else self._constraints.mask_of(start)
            self._sequences.start_sequence(start, mask)
        stepped = [self._sequences.advance_sequence(entry) for entry in plan.steps]
        sampled = [sequence for sequence, entry in zip(stepped, plan.steps, strict=True) if entry.sample]
        launch = Launch(plan, stepped, sampled, sampled_rows(plan.steps, stepped))
        if plan.copies is not None:
            launch.lost_slots = self._kv_store.copy_blocks(plan.copies)
        outcome: _Outcome | None = None
        if plan.steps:
            outcome = self._compute(rank_step, launch)
        elif any(rank_step.replica_tokens):
            self._stage.run_empty_step(rank_step.replica_tokens, rank_step.replica_samples)
        pending = PendingStep(self._inputs.download(launch.tensors), partial(self._finish, started, launch, outcome))
        self._in_flight.append(pending)
        if pending.is_over:
            pending.result()
        if self._expert_load is not None:
            self._expert_load.publish_counts()
        return pending

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest step in flight, and take its tokens."""
        self._in_flight[0].result()

    def _compute(self, rank_step: RankStep, launch: Launch) -> _Outcome | None:
        """Receive, forward, head, send. Returns what was sampled; None: this rank samples nothing in this step."""
        sampler, rows = self._sampler, launch.rows
        sampling = sampler.plan_sampling(rows) if sampler is not None and rows else None
        launch.features = [active for feature in self._features if (active := feature.begin(launch)) is not None]
        lm_head = self._stage.lm_head
        fuses_argmax = lm_head is not None and lm_head.fuses_argmax and not launch.needs_logits
        greedy = fuses_argmax and sampling is not None and sampling.is_greedy
        step = self._inputs.make_step(rank_step, launch.stepped, sampling, greedy)
        for feature in launch.features:
            step = feature.prepare(launch, step)
        if self._groups.from_previous is None:
            hidden = self._stage.embed(step)
        else:
            shape = (launch.plan.num_tokens, self._sizes.hidden_size)
            hidden = self._groups.from_previous.receive(shape, self._sizes.dtype)
        step = self._stage.add_inputs(step, hidden)
        output = (launch.forward or self._forward)(step, hidden)
        if self._groups.to_next is not None:
            self._groups.to_next.send(output)
        for feature in launch.features:
            feature.after_forward(launch, step, output)
        if sampler is None or sampling is None:
            return None
        inputs = sampling.inputs if step.sampling is None else step.sampling
        if step.greedy:
            sampled = sampler.choose_best(output)
        else:
            sampled = sampler.sample_tokens(output, sampling, inputs, launch.masks)
        self._inputs.keep_tokens(inputs, sampled.tokens)
        for sequence in launch.sampled:
            if not sequence.num_guessed:
                sequence.append_pending()
        return _Outcome(sampling, sampled, launch.download(*sampled.list_tensors()))

    def _finish(
        self, started: float, launch: Launch, outcome: _Outcome | None, copies: list[Tensor]
    ) -> StepResult | None:
        """The result of the oldest step in flight."""
        self._in_flight.popleft()
        self._groups.progress.finish(launch.plan.step_id)
        if self._sampler is None and not self._stage.embeds_prompts and launch.lost_slots is None:
            return None
        launch.copies = copies
        results: list[SequenceResult] = []
        if outcome is not None:
            assert self._sampler is not None
            sampled = outcome.sampled.from_copies(copies[outcome.place])
            results = self._sampler.make_results(outcome.sampling, sampled)
        for feature in launch.features:
            results = feature.result(launch, results)
        sequences = {sequence.seq_id: sequence for sequence in launch.sampled}
        for result in results:
            if result.token_ids:
                sequences[result.seq_id].take_tokens(result.token_ids)
        if launch.errors or launch.refusals:
            results = _with_errors(results, launch.errors, launch.refusals)
        # A step that was launched during another step began when that step ended.
        now = time.perf_counter()
        seconds, self._finished = now - max(started, self._finished), now
        return StepResult(launch.plan.step_id, results, seconds, launch.lost_slots)


class _Outcome(NamedTuple):
    """What a step has sampled."""

    sampling: SamplingPlan
    sampled: Sampled
    place: slice
    """Of its tensors in `Launch.copies`."""


def _with_errors(
    results: list[SequenceResult], errors: dict[int, str], refusals: dict[int, str]
) -> list[SequenceResult]:
    """`results`, in which the sequences in `errors` and `refusals` are marked as failed, see `SequenceResult`."""
    return [
        msgspec.structs.replace(
            result,
            error=errors.get(result.seq_id) or refusals.get(result.seq_id, ""),
            refused=result.seq_id not in errors and result.seq_id in refusals,
        )
        for result in results
    ]
