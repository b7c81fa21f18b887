"""StepPlan -> tensors -> forward -> sample -> StepResult, on one rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.messages.step import RankStep, SequenceResult, SequenceStep, StepPlan, StepResult
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.guesses import guessed_rows
from shardline.runtime.kv_store import KVStore
from shardline.runtime.lockstep import run_empty_step
from shardline.runtime.machines.base import Counters, Download, Forward, StepInputs, StepSizes
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.sampling.sampler import Sampled, Sampler, SamplingPlan
from shardline.runtime.sequences import SequenceTable, WorkerSequence
from shardline.runtime.step import StepInput


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
        stage: DecoderStage,
        groups: RankGroups,
        kv_store: KVStore,
        forward: Forward,
        sizes: StepSizes,
        sequences: SequenceTable,
        inputs: StepInputs,
        sampler: Sampler | None,
        features: Sequence[Feature],
        expert_load: Counters | None,
    ) -> None:
        """`forward`: the stage's forward pass, or a `Replay` of it. `inputs`: of these `sequences`. `sampler`: None: it
        samples nothing. `features` read results in their order. `expert_load` is published after each launch."""
        self._stage = stage
        self._groups = groups
        self._kv_store = kv_store
        self._forward = forward
        self._sizes = sizes
        self._sequences = sequences
        self._inputs = inputs
        self._sampler = sampler
        self._features = features
        self._expert_load = expert_load
        self._in_flight: deque[PendingStep] = deque()
        self._finished = 0.0
        """When the last step finished, by `time.perf_counter`."""
        self._fuses_argmax = stage.lm_head is not None and stage.lm_head.fuses_argmax
        self._met_by_all = frozenset(
            place for place, feature in enumerate(features) if not (feature.start_fields or feature.step_fields)
        )
        """The places of features that meet all sequences."""
        self._of_starts = _askers(feature.start_fields for feature in features)
        self._of_steps = _askers(feature.step_fields for feature in features)

    def run_step(self, rank_step: RankStep) -> StepResult | None:
        """Run one step. Ranks of the last stage return the sampled tokens; other ranks return None, unless the plan
        copies blocks."""
        return self.launch_step(rank_step).result()

    @torch.inference_mode()
    def launch_step(self, rank_step: RankStep) -> PendingStep:
        """Launch one step. On the CPU, the step is over when this returns; a device may still run this step and the
        previous one.

        Later steps can use its sampled tokens at once: stand-ins hold their places.
        """
        # A sequence may have at most one unknown token, see `Penalties.uncounted`.
        while len(self._in_flight) > 1:
            self._in_flight[0].result()
        started = time.perf_counter()
        self._groups.progress.begin()
        running = self._begin(rank_step.plan)
        if rank_step.plan.copies is not None:
            # Where other replicas compute, they wait for this rank in every layer.
            idle = not any(rank_step.replica_tokens)
            running.copied = self._kv_store.copy_blocks(rank_step.plan.copies, may_wait=idle)
        outcome: _Outcome | None = None
        if running.stepped:
            outcome = self._compute(rank_step, running)
        elif any(rank_step.replica_tokens):
            run_empty_step(self._stage, rank_step.replica_tokens, rank_step.replica_samples)
        pending = PendingStep(self._inputs.download(running.tensors), partial(self._finish, started, running, outcome))
        self._in_flight.append(pending)
        if pending.is_over:
            pending.result()
        if self._expert_load is not None:
            self._expert_load.publish_counts()
        return pending

    def _begin(self, plan: StepPlan) -> RunningStep:
        """End, start and advance sequences as the plan says; features see what the step asks for."""
        for seq_id in plan.ends:
            self._sequences.end_sequence(seq_id)
        for start in plan.starts:
            sequence = self._sequences.start_sequence(start)
            sequence.features = self._met_by_all.union(place for asks, place in self._of_starts if asks(start))
            for place in sorted(sequence.features):
                self._features[place].start_sequence(sequence, start)
        stepped = [self._sequences.advance_sequence(entry) for entry in plan.steps]
        sampled = [sequence for sequence, entry in zip(stepped, plan.steps, strict=True) if entry.sample]
        rows = guessed_rows(sampled) if any(sequence.num_guessed for sequence in sampled) else sampled
        sampling = self._sampler.plan_sampling(rows) if self._sampler is not None and rows else None
        greedy = self._fuses_argmax and sampling is not None and sampling.is_greedy
        running = RunningStep(plan, stepped, sampled, rows, sampling, greedy, self._forward, self._in_flight)
        met = self._features_of(plan.steps, stepped)
        running.features = [active for feature in met if (active := feature.begin(running)) is not None]
        return running

    def _features_of(self, steps: Sequence[SequenceStep], sequences: Sequence[WorkerSequence]) -> list[Feature]:
        """The features that the steps of these sequences have, in their order."""
        places: set[int] = set()
        for step, sequence in zip(steps, sequences, strict=True):
            places |= sequence.features
            for asks, place in self._of_steps:
                if asks(step):
                    places.add(place)
        return [self._features[place] for place in sorted(places)]

    def _compute(self, rank_step: RankStep, running: RunningStep) -> _Outcome | None:
        """Receive, forward, head, send. Returns what was sampled; None: this rank samples nothing in this step."""
        step = self._inputs.make_step(rank_step, running.stepped, running.sampling, running.greedy)
        for feature in running.features:
            step = feature.prepare(running, step)
        step, hidden = self._receive(step)
        output = running.forward(step, hidden)
        for feature in running.features:
            feature.after_forward(running, step, output)
        if self._groups.to_next is not None:
            self._groups.to_next.send(output)
        return self._sample(running, step, output)

    def _receive(self, step: StepInput) -> tuple[StepInput, Tensor]:
        """The hidden states of the step's tokens, [T, H], and the step with all that the layers read beside them."""
        if self._groups.from_previous is None:
            hidden = self._stage.embed(step)
        else:
            shape = (len(step.rows), self._sizes.hidden_size)
            hidden = self._groups.from_previous.receive(shape, self._sizes.dtype)
        return self._stage.add_inputs(step, hidden), hidden

    def _sample(self, running: RunningStep, step: StepInput, output: Tensor) -> _Outcome | None:
        """Tokens of the sampled rows; `output` is that of the stage."""
        sampler, sampling = self._sampler, running.sampling
        if sampler is None or sampling is None:
            return None
        inputs = sampling.inputs if step.sampling is None else step.sampling
        if step.greedy:
            sampled = sampler.choose_best(output)
        else:
            readers, editors = ([partial(call, running) for call in to] for to in (running.readers, running.editors))
            sampled = sampler.sample_tokens(output, sampling, inputs, running.masks, readers, editors)
        self._inputs.keep_tokens(inputs, sampled.tokens)
        for sequence in running.sampled:
            sequence.append_pending()
        return _Outcome(sampling, sampled, running.download(*sampled.list_tensors()))

    def _finish(
        self, started: float, running: RunningStep, outcome: _Outcome | None, copies: list[Tensor]
    ) -> StepResult | None:
        """The result of the oldest step in flight."""
        self._in_flight.popleft()
        self._groups.progress.finish(running.plan.step_id)
        if not self._stage.is_last and running.copied is None:
            return None
        running.copies = copies
        results: list[SequenceResult] = []
        if outcome is not None:
            sampled = outcome.sampled.from_copies(copies[outcome.place])
            results = Sampler.make_results(outcome.sampling, sampled)
        for feature in running.features:
            results = feature.result(running, results)
        sequences = {sequence.seq_id: sequence for sequence in running.sampled}
        for result in results:
            if result.token_ids:
                sequences[result.seq_id].take_tokens(result.token_ids)
        # A step that was launched during another step began when that step ended.
        now = time.perf_counter()
        seconds, self._finished = now - max(started, self._finished), now
        return StepResult(running.plan.step_id, results, seconds, running.copied)


def _askers(fields: Iterable[Sequence[str]]) -> list[tuple[Callable[[object], object], int]]:
    """What reads each field that asks for a feature, and the place of the feature."""
    return [(attrgetter(field), place) for place, names in enumerate(fields) for field in names]


class _Outcome(NamedTuple):
    """What a step has sampled."""

    sampling: SamplingPlan
    sampled: Sampled
    place: slice
    """Of its tensors in `RunningStep.copies`."""
