"""StepPlan -> tensors -> forward -> sample -> StepResult, on one rank."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.messages.step import RankStep, SequenceResult, StepResult
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.finite import FiniteChecker, with_errors
from shardline.runtime.machines.base import Backend, Counters, Download, Forward, StepSizes
from shardline.runtime.ops.sampling.logprobs import Logprobs
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.sampling.prompt_scores import (
    PromptScores,
    ScoringPlan,
    add_scores,
    join_logprobs,
    plan_scoring,
)
from shardline.runtime.sampling.sampler import Sampled, Sampler, SamplingPlan
from shardline.runtime.sampling.token_mask import MaskMemory, collect_masks, make_mask
from shardline.runtime.sequences import SequenceTable, WorkerSequence
from shardline.runtime.speculative.rows import join_rows, sampled_rows
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


class _Launched(NamedTuple):
    """What `_finish` needs from a step's launch."""

    sampling: SamplingPlan | None
    sampled: Sampled | None
    sequences: list[WorkerSequence]
    """The sequences that are sampled."""
    errors: dict[int, str]
    """What failed, by sequence."""
    refusals: dict[int, str]
    """Why no token may follow, by sequence."""
    drafts: list[list[int]] | None = None
    """Those of `sequences`; None: no sequence has one."""
    scores: PromptScores | None = None
    pooled: Tensor | None = None
    """[R, H] float32: the final hidden states of `sequences`."""

    def list_tensors(self) -> list[Tensor]:
        """All tensors, to be copied."""
        sampled = [] if self.sampled is None else self.sampled.list_tensors()
        scores = [] if self.scores is None else list(self.scores.logprobs)
        return sampled + scores + ([] if self.pooled is None else [self.pooled])


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
        finite_checker: FiniteChecker | None,
        expert_load: Counters | None = None,
    ) -> None:
        """`forward`: the stage's forward pass, or a `Replay` of it. `expert_load` is published after each launch."""
        self._stage = stage
        self._groups = groups
        self._forward = forward
        self._sizes = sizes
        self._finite_checker = finite_checker
        self._expert_load = expert_load
        self._sampler: Sampler | None = None
        self._mask_memory: MaskMemory | None = None
        self._vocab_size = 0
        """0: this rank does not sample."""
        if stage.lm_head is not None:
            self._vocab_size = max(span.stop for span in stage.lm_head.spans)
            self._mask_memory = MaskMemory(sizes.max_seqs, stage.lm_head.spans[groups.tensor.rank])
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
            self._sequences.start_sequence(start, make_mask(start, self._vocab_size) if self._vocab_size else None)
        launched = _Launched(None, None, [], {}, {})
        if plan.steps:
            launched = self._compute(rank_step)
        elif any(rank_step.replica_tokens):
            self._stage.run_empty_step(rank_step.replica_tokens, rank_step.replica_samples)
        download = self._inputs.download(launched.list_tensors())
        pending = PendingStep(download, partial(self._finish, plan.step_id, started, launched))
        self._in_flight.append(pending)
        if pending.is_over:
            pending.result()
        if self._expert_load is not None:
            self._expert_load.publish_counts()
        return pending

    def _finish(self, step_id: int, started: float, launched: _Launched, downloaded: list[Tensor]) -> StepResult | None:
        """The result of the oldest step in flight."""
        self._in_flight.popleft()
        self._groups.progress.finish(step_id)
        if launched.pooled is not None:
            rows = zip(launched.sequences, downloaded[0], strict=True)
            pooled = [SequenceResult(sequence.seq_id, [], embedding=row.numpy().tobytes()) for sequence, row in rows]
            return StepResult(step_id, with_errors(pooled, launched.errors, {}), time.perf_counter() - started)
        if self._sampler is None and not self._stage.embeds_prompts:
            return None
        results: list[SequenceResult] = []
        if launched.sampled is not None:
            assert launched.sampling is not None
            assert self._sampler is not None
            results = self._sampler.make_results(launched.sampling, launched.sampled.from_copies(downloaded))
            if launched.drafts is not None:
                results = join_rows(launched.drafts, results)
            for sequence, result in zip(launched.sequences, results, strict=True):
                sequence.take_tokens(result.token_ids)
        if launched.scores is not None:
            scores = launched.scores
            results = add_scores(results, scores.from_copies(downloaded[-len(scores.logprobs) :]))
        if launched.errors or launched.refusals:
            results = with_errors(results, launched.errors, launched.refusals)
        # A step that was launched during another step began when that step ended.
        now = time.perf_counter()
        seconds, self._finished = now - max(started, self._finished), now
        return StepResult(step_id, results, seconds)

    def _compute(self, rank_step: RankStep) -> _Launched:
        plan, sampler = rank_step.plan, self._sampler
        stepped = [self._sequences.advance_sequence(entry) for entry in plan.steps]
        sequences = [sequence for sequence, entry in zip(stepped, plan.steps, strict=True) if entry.sample]
        rows = sampled_rows(plan.steps, stepped)
        sampling = sampler.plan_sampling(rows) if sampler is not None and rows else None
        lm_head = self._stage.lm_head
        scoring = plan_scoring(plan.steps, stepped)
        fuses_argmax = lm_head is not None and lm_head.fuses_argmax and scoring is None
        greedy = fuses_argmax and sampling is not None and sampling.is_greedy
        step = self._inputs.make_step(rank_step, stepped, sampling, greedy)
        refusals: dict[int, str] = {}
        if greedy:
            step, refusals = self._restrict_search(step, rows)
        if self._groups.from_previous is None:
            hidden = self._stage.embed(step)
        else:
            shape = (plan.num_tokens, self._sizes.hidden_size)
            hidden = self._groups.from_previous.receive(shape, self._sizes.dtype)
        step = self._stage.add_inputs(step, hidden)
        scores = None
        if sampler is not None and scoring is not None:
            output, scores = self._score(step, hidden, sampler, scoring)
        else:
            output = self._forward(step, hidden)
        if self._groups.to_next is not None:
            self._groups.to_next.send(output)
        errors = self._finite_checker.report_step(plan) if self._finite_checker is not None else {}
        if self._stage.embeds_prompts and sequences:
            return _Launched(None, None, sequences, errors, {}, pooled=output.float())
        if sampler is None or sampling is None:
            return _Launched(None, None, [], errors, {}, scores=scores)
        inputs = sampling.inputs if step.sampling is None else step.sampling
        if step.greedy:
            sampled = sampler.choose_best(output)
        else:
            masks, refusals = self._collect_masks(rows, output.device)
            sampled = sampler.sample_tokens(output, sampling, inputs, masks)
        self._inputs.keep_tokens(inputs, sampled.tokens)
        for sequence in sequences:
            if not sequence.num_guessed:
                sequence.append_pending()
        drafts = [entry.draft_token_ids for entry in plan.steps if entry.sample] if len(rows) > len(sequences) else None
        return _Launched(sampling, sampled, sequences, errors, refusals, drafts, scores)

    def _score(
        self, step: StepInput, hidden: Tensor, sampler: Sampler, scoring: ScoringPlan
    ) -> tuple[Tensor, PromptScores]:
        """The logits of the sampled rows, and the log probabilities of the prompts' tokens."""
        assert step.scored is not None
        targets, widest = step.scored.targets, max(scoring.top_logprobs)
        parts: list[Logprobs] = []

        def read_logits(rows: slice, logits: Tensor) -> None:
            parts.append(sampler.score_rows(logits, targets[rows], widest))

        output = self._stage.forward_scored(step, hidden, sampler.scored_rows_each, read_logits)
        return output, PromptScores(scoring, join_logprobs(parts))

    def _restrict_search(self, step: StepInput, sequences: list[WorkerSequence]) -> tuple[StepInput, dict[int, str]]:
        """A greedy step with the tokens that its rows may have, and the errors of sequences that cannot go on."""
        masks, errors = self._collect_masks(sequences, torch.device("cpu"))
        if masks is None:
            return step, errors
        assert self._mask_memory is not None
        return dataclasses.replace(step, allowed=self._mask_memory.write(masks, len(sequences))), errors

    def _collect_masks(
        self, sequences: list[WorkerSequence], device: torch.device
    ) -> tuple[TokenMasks | None, dict[int, str]]:
        """The masks of the sampled rows, on the device, and the errors of sequences that cannot go on, by their ids.

        A mask depends on the sequence's last token, so this waits for steps in flight that sample it.
        """
        constrained = [sequence for sequence in sequences if sequence.mask is not None]
        if not constrained:
            return None, {}
        while any(sequence.num_pending for sequence in constrained):
            self._in_flight[0].result()
        masks, errors = collect_masks([sequence.mask for sequence in sequences])
        if masks is not None:
            masks = TokenMasks(masks.rows.to(device), masks.bits.to(device))
        return masks, {sequences[row].seq_id: error for row, error in errors.items()}
