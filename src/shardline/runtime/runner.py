"""StepPlan -> tensors -> forward -> sample -> StepResult, on one rank."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.runtime.backends.base import Backend, Forward, StepSizes
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.finite import FiniteWatch, with_errors
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.pending import PendingStep
from shardline.runtime.sampling.sampler import Sampled, Sampler, SamplingPlan
from shardline.runtime.sequences import SequenceTable, WorkerSequence
from shardline.types import RankStep, SequenceResult, StepResult


class _Launched(NamedTuple):
    """What `_finish` needs from a step's launch."""

    sampling: SamplingPlan | None
    sampled: Sampled | None
    sequences: list[WorkerSequence]
    """The sequences that are sampled."""
    errors: dict[int, str]


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
        forward: Forward,
        sizes: StepSizes,
        watch: FiniteWatch | None,
    ) -> None:
        """`forward`: the stage's forward pass, or a `Replay` of it."""
        self._stage = stage
        self._groups = groups
        self._forward = forward
        self._sizes = sizes
        self._watch = watch
        self._sampler: Sampler | None = None
        if stage.lm_head is not None:
            self._sampler = Sampler(backend.kernels, stage.lm_head.spans, groups.tensor, backend.device)
        self._sequences = SequenceTable(sizes.num_kv_groups, sizes.max_blocks)
        self._inputs = backend.make_step_inputs(self._sequences, sizes)
        self._in_flight: deque[PendingStep] = deque()
        self._finished = 0.0
        """When the last step finished, by `time.perf_counter`."""

    def run_step(self, rank_step: RankStep) -> StepResult | None:
        """Run one step. Ranks of the last stage return the sampled tokens, other ranks return None."""
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
        plan = rank_step.plan
        for seq_id in plan.ends:
            self._sequences.end_sequence(seq_id)
        for start in plan.starts:
            self._sequences.start_sequence(start)
        launched = _Launched(None, None, [], {})
        if plan.steps:
            launched = self._compute(rank_step)
        elif any(rank_step.replica_tokens):
            self._stage.take_part(rank_step.replica_tokens, rank_step.replica_samples)
        download = self._inputs.download([] if launched.sampled is None else launched.sampled.list_tensors())
        pending = PendingStep(download, partial(self._finish, plan.step_id, started, launched))
        self._in_flight.append(pending)
        if pending.is_over:
            pending.result()
        return pending

    def _finish(self, step_id: int, started: float, launched: _Launched, downloaded: list[Tensor]) -> StepResult | None:
        """The result of the oldest step in flight."""
        self._in_flight.popleft()
        self._groups.progress.finish(step_id)
        if self._sampler is None:
            return None
        results: list[SequenceResult] = []
        if launched.sampled is not None:
            assert launched.sampling is not None
            results = self._sampler.make_results(launched.sampling, launched.sampled.from_copies(downloaded))
            for sequence, result in zip(launched.sequences, results, strict=True):
                for token_id in result.token_ids:
                    sequence.settle_token(token_id)
        if launched.errors:
            results = with_errors(results, launched.errors)
        # A step that was launched during another step began when that step ended.
        now = time.perf_counter()
        seconds, self._finished = now - max(started, self._finished), now
        return StepResult(step_id, results, seconds)

    def _compute(self, rank_step: RankStep) -> _Launched:
        plan, sampler = rank_step.plan, self._sampler
        stepped = [self._sequences.advance_sequence(entry) for entry in plan.steps]
        sequences = [sequence for sequence, entry in zip(stepped, plan.steps, strict=True) if entry.sample]
        sampling = sampler.plan_sampling(sequences) if sampler is not None and sequences else None
        lm_head = self._stage.lm_head
        greedy = lm_head is not None and lm_head.fuses_argmax and sampling is not None and sampling.is_greedy
        step = self._inputs.make_step(rank_step, stepped, sampling, greedy)
        if self._groups.from_previous is None:
            hidden = self._stage.embed(step)
        else:
            shape = (plan.num_tokens, self._sizes.hidden_size)
            hidden = self._groups.from_previous.receive(shape, self._sizes.dtype)
        output = self._forward(step, hidden)
        if self._groups.to_next is not None:
            self._groups.to_next.send(output)
        errors = self._watch.report_step(plan) if self._watch is not None else {}
        if sampler is None or sampling is None:
            return _Launched(None, None, [], errors)
        inputs = sampling.inputs if step.sampling is None else step.sampling
        sampled = sampler.choose_best(output) if step.greedy else sampler.sample_tokens(output, sampling, inputs)
        self._inputs.keep_tokens(inputs, sampled.tokens)
        for sequence in sequences:
            sequence.append_pending()
        return _Launched(sampling, sampled, sequences, errors)
