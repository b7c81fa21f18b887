"""Log probabilities of a prompt's tokens, from the logits at the positions before them.

All logits of a long prompt would not fit, so they are computed and read a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shardline.messages.request import TokenLogprobs
from shardline.messages.step import SequenceResult, SequenceStep
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.ops.sampling.logprobs import Logprobs
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.sequences import WorkerSequence, num_scored
from shardline.runtime.step import StepInput


class ScoringPlan(NamedTuple):
    """What the scored sequences of a step ask for."""

    seq_ids: list[int]
    counts: list[int]
    """Number of scored tokens of each sequence."""
    top_logprobs: list[int]
    """How many of the most likely tokens each sequence wants beside each prompt token."""


def plan_scoring(steps: Sequence[SequenceStep], sequences: Sequence[WorkerSequence]) -> ScoringPlan | None:
    """What a step scores; None: nothing."""
    plan = ScoringPlan([], [], [])
    for step, sequence in zip(steps, sequences, strict=True):
        if step.score:
            plan.seq_ids.append(step.seq_id)
            plan.counts.append(num_scored(step, sequence))
            plan.top_logprobs.append(sequence.sampling.prompt_logprobs or 0)
    return plan if plan.seq_ids else None


class Scores(Feature):
    """Scores the tokens of prompts that ask for it."""

    def __init__(self, stage: DecoderStage, sampler: Sampler) -> None:
        self._stage = stage
        self._sampler = sampler

    def begin(self, running: RunningStep) -> StepScores | None:
        plan = plan_scoring(running.plan.steps, running.stepped)
        if plan is None:
            return None
        running.greedy = False
        scores = StepScores(self._stage, self._sampler, plan)
        running.forward = scores.forward
        return scores


class StepScores(Feature):
    """The scores of one step."""

    def __init__(self, stage: DecoderStage, sampler: Sampler, plan: ScoringPlan) -> None:
        self._stage = stage
        self._sampler = sampler
        self._plan = plan
        self._parts: list[Logprobs] = []
        self._place = slice(0, 0)

    def forward(self, step: StepInput, hidden: Tensor) -> Tensor:
        """The logits of the sampled rows. Those of scored rows are read meanwhile, some at a time."""
        scored = step.rows.narrow().scored
        assert scored is not None
        targets, widest = scored.targets, max(self._plan.top_logprobs)

        def read_logits(rows: slice, logits: Tensor) -> None:
            self._parts.append(self._sampler.score_rows(logits, targets[rows], widest))

        return self._stage.forward_scored(step, hidden, self._sampler.scored_rows_each, read_logits)

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        self._place = running.download(*join_logprobs(self._parts))

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        return add_scores(results, self._plan, Logprobs(*running.copies[self._place]))


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """The rows of several parts, one after another."""
    return parts[0] if len(parts) == 1 else Logprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def add_scores(results: Sequence[SequenceResult], plan: ScoringPlan, scores: Logprobs) -> list[SequenceResult]:
    """`results` with the scores, which are in host memory. A sequence that was only scored gets one without tokens."""
    by_id = {result.seq_id: result for result in results}
    entries = iter(zip(*(tensor.tolist() for tensor in scores), strict=True))
    for seq_id, count, most in zip(plan.seq_ids, plan.counts, plan.top_logprobs, strict=True):
        own = [
            TokenLogprobs(logprob, rank, ids[:most], values[:most])
            for logprob, rank, ids, values in islice(entries, count)
        ]
        result = by_id.get(seq_id, SequenceResult(seq_id, []))
        by_id[seq_id] = msgspec.structs.replace(result, prompt_logprobs=own)
    return list(by_id.values())
