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
from shardline.runtime.ops.sampling.logprobs import Logprobs
from shardline.runtime.sequences import WorkerSequence, num_scored

MAX_LOGIT_BYTES = 64 * 1024 * 1024
"""Most memory for logits that are only scored."""


class ScoringPlan(NamedTuple):
    """What the scored sequences of a step ask for."""

    seq_ids: list[int]
    counts: list[int]
    """Number of scored tokens of each sequence."""
    top_logprobs: list[int]
    """How many of the most likely tokens each sequence wants beside each prompt token."""


class PromptScores(NamedTuple):
    """The scores of a step's scored tokens, one after another."""

    plan: ScoringPlan
    logprobs: Logprobs

    def from_copies(self, tensors: Sequence[Tensor]) -> PromptScores:
        """The same with copies of the tensors of `logprobs`."""
        return PromptScores(self.plan, Logprobs(*tensors))


def plan_scoring(steps: Sequence[SequenceStep], sequences: Sequence[WorkerSequence]) -> ScoringPlan | None:
    """What a step scores; None: nothing."""
    plan = ScoringPlan([], [], [])
    for step, sequence in zip(steps, sequences, strict=True):
        if step.score:
            plan.seq_ids.append(step.seq_id)
            plan.counts.append(num_scored(step, sequence))
            plan.top_logprobs.append(sequence.sampling.prompt_logprobs or 0)
    return plan if plan.seq_ids else None


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """The rows of several parts, one after another."""
    return parts[0] if len(parts) == 1 else Logprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def add_scores(results: Sequence[SequenceResult], scores: PromptScores) -> list[SequenceResult]:
    """`results` with the scores, which are in host memory. A sequence that was only scored gets one without tokens."""
    by_id = {result.seq_id: result for result in results}
    entries = iter(zip(*(tensor.tolist() for tensor in scores.logprobs), strict=True))
    plan = scores.plan
    for seq_id, count, most in zip(plan.seq_ids, plan.counts, plan.top_logprobs, strict=True):
        own = [
            TokenLogprobs(logprob, rank, ids[:most], values[:most])
            for logprob, rank, ids, values in islice(entries, count)
        ]
        result = by_id.get(seq_id, SequenceResult(seq_id, []))
        by_id[seq_id] = msgspec.structs.replace(result, prompt_logprobs=own)
    return list(by_id.values())
