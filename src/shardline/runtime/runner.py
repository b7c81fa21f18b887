"""StepPlan -> tensors -> forward -> sample -> StepResult, on one rank."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.runtime.decoder import DecoderStage
from shardline.runtime.device import Device, Uploader
from shardline.runtime.download import Download
from shardline.runtime.finite import FiniteWatch, with_errors
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.pending import PendingStep
from shardline.runtime.replay import Forward
from shardline.runtime.sampling.last_tokens import LastTokens
from shardline.runtime.sampling.sampler import Sampled, Sampler, SamplingPlan
from shardline.runtime.sequences import Sequence, SequenceTable
from shardline.runtime.step import StepInput
from shardline.runtime.step_inputs import StepInputs
from shardline.types import RankStep, SequenceResult, StepResult


class _Launched(NamedTuple):
    """What a step's launch leaves for its end."""

    sampling: SamplingPlan | None
    sampled: Sampled | None
    sequences: list[Sequence]
    """Those that are sampled."""
    errors: dict[int, str]


class Runner:
    """Runs the steps of one rank, in the order they were planned, on a device up to two at once.

    Every rank keeps the tokens of all its sequences; those of the last stage append what they sample themselves, so
    that the next plan may name a token that the engine does not know yet.
    """

    def __init__(
        self,
        stage: DecoderStage,
        groups: RankGroups,
        sampler: Sampler | None,
        forward: Forward,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        block_size: int,
        max_blocks: int,
        max_num_seqs: int,
        num_kv_groups: int,
        watch: FiniteWatch | None,
        device: Device,
    ) -> None:
        """`forward`: the stage's, or what replays it; `max_blocks`: of the longest sequence."""
        self._stage = stage
        self._groups = groups
        self._sampler = sampler
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._sequences = SequenceTable(num_kv_groups, max_blocks)
        self._inputs = StepInputs(
            self._sequences,
            num_kv_groups=num_kv_groups,
            block_size=block_size,
            max_blocks=max_blocks,
            max_seqs=max_num_seqs,
            stays=device.is_host,
        )
        self._watch = watch
        # Elsewhere steps are captured with all logits, and whoever looks for NaN looks at all.
        self._finds_best = device.is_host and watch is None and stage.lm_head is not None and stage.lm_head.finds_best
        self._forward = forward
        self._device = device
        self._uploader = None if device.is_host else Uploader(device.torch)
        self._last_tokens = None if device.is_host else LastTokens(device.torch, max_num_seqs)
        self._in_flight: deque[PendingStep] = deque()
        self._finished = 0.0
        """When the last step did."""

    def run(self, rank_step: RankStep) -> StepResult | None:
        """Run one step. The last stage's ranks return what was sampled, the others None."""
        return self.launch(rank_step).result()

    @torch.inference_mode()
    def launch(self, rank_step: RankStep) -> PendingStep:
        """Begin one step: on the host it is over then, a device may still run it, and the step before.

        What it samples is known to later steps at once, by what stands for it.
        """
        # Of no sequence may two tokens be unknown here, see SamplingInput.
        while len(self._in_flight) > 1:
            self._in_flight[0].result()
        started = time.perf_counter()
        plan = rank_step.plan
        for seq_id in plan.ends:
            self._sequences.end(seq_id)
        for start in plan.starts:
            self._sequences.start(start)
        launched = _Launched(None, None, [], {})
        if plan.steps:
            launched = self._compute(rank_step)
        elif any(rank_step.replica_tokens):
            self._stage.join(rank_step.replica_tokens, rank_step.replica_samples)
        finish = partial(self._finish, plan.step_id, started, launched)
        if self._device.is_host:
            pending = PendingStep(None, finish)
            self._in_flight.append(pending)
            pending.result()
        else:
            sampled = launched.sampled
            download = Download([] if sampled is None else sampled.tensors(), self._device.torch)
            pending = PendingStep(download, finish)
            self._in_flight.append(pending)
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
            sampled = launched.sampled.moved(downloaded) if downloaded else launched.sampled
            results = self._sampler.results(launched.sampling, sampled)
            for sequence, result in zip(launched.sequences, results, strict=True):
                for token_id in result.token_ids:
                    sequence.settle(token_id)
        if launched.errors:
            results = with_errors(results, launched.errors)
        # A step launched behind another began when that ended.
        now = time.perf_counter()
        seconds, self._finished = now - max(started, self._finished), now
        return StepResult(step_id, results, seconds)

    def _compute(self, rank_step: RankStep) -> _Launched:
        plan, sampler = rank_step.plan, self._sampler
        stepped = [self._sequences.advance(entry) for entry in plan.steps]
        sequences = [sequence for sequence, entry in zip(stepped, plan.steps, strict=True) if entry.sample]
        sampling = sampler.plan(sequences) if sampler is not None and sequences else None
        greedy = self._finds_best and sampling is not None and sampling.is_greedy
        step = self._inputs.make(rank_step, stepped, greedy)
        if self._uploader is not None:
            step = self._on_device(self._uploader, step, sampling)
        if self._groups.from_previous is None:
            hidden = self._stage.embed(step)
        else:
            hidden = self._groups.from_previous.receive((plan.num_tokens, self._hidden_size), self._dtype)
        output = self._forward(step, hidden)
        if self._groups.to_next is not None:
            self._groups.to_next.send(output)
        errors = self._watch.report(plan) if self._watch is not None else {}
        if sampler is None or sampling is None:
            return _Launched(None, None, [], errors)
        given = sampling.given if step.sampling is None else step.sampling
        sampled = sampler.choose(output) if step.greedy else sampler.sample(output, sampling, given)
        if self._last_tokens is not None:
            self._last_tokens.put(given.rows, sampled.tokens)
        for sequence in sequences:
            sequence.append_pending()
        return _Launched(sampling, sampled, sequences, errors)

    def _on_device(self, uploader: Uploader, step: StepInput, sampling: SamplingPlan | None) -> StepInput:
        """The step on the device, with the tokens that the host does not know yet."""
        tokens = self._last_tokens
        assert tokens is not None
        tokens.reserve(self._sequences.num_rows)
        has_unknown = bool((step.token_ids < 0).any())
        step = uploader.upload(step if sampling is None else dataclasses.replace(step, sampling=sampling.given))
        return dataclasses.replace(
            step,
            token_ids=tokens.known(step.token_ids) if has_unknown else step.token_ids,
            sampling=None if step.sampling is None else step.sampling.known(tokens),
        )
