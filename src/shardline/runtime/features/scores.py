"""Log probabilities of a prompt's tokens, from the logits at the positions before them.

All logits of a long prompt would not fit, so they are computed and read a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from shardline.config.engine import LogprobsMode
from shardline.kernels.contract import Kernels
from shardline.messages.request import TokenLogprobs
from shardline.messages.step import SequenceResult, SequenceStep
from shardline.models.partition import Span
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.parallel.collectives import Collectives
from shardline.runtime.sampling.reports import Reports, Wanted, read_reports, report
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import Rows, ScoredRows, StepInput

_SCORED_LOGIT_BYTES = 64 << 20
"""Most memory for logits that are only scored."""


class ScoringPlan(NamedTuple):
    """What the scored sequences of a step ask for."""

    seq_ids: list[int]
    counts: list[int]
    """Number of scored tokens of each sequence."""
    wanted: list[Wanted]
    """What each sequence reports of each prompt token."""


def plan_scoring(steps: Sequence[SequenceStep], sequences: Sequence[WorkerSequence]) -> ScoringPlan:
    """What a step scores."""
    plan = ScoringPlan([], [], [])
    for step, sequence in zip(steps, sequences, strict=True):
        if step.score:
            plan.seq_ids.append(step.seq_id)
            plan.counts.append(_num_scored(step, sequence))
            plan.wanted.append(Wanted(sequence.sampling.prompt_logprobs or 0))
    return plan


def scored_rows(steps: Sequence[SequenceStep], sequences: Sequence[WorkerSequence]) -> ScoredRows:
    """The scored tokens among the rows that go on; those behind the prompt are not scored."""
    rows, targets = [], []
    sampled: list[int] = []
    first = 0
    for entry, sequence in zip(steps, sequences, strict=True):
        if entry.score:
            count = _num_scored(entry, sequence)
            rows.append(np.arange(first, first + count))
            targets.append(sequence.tokens[entry.start + 1 : entry.start + 1 + count])
        first += entry.num_samples
        if entry.sample:
            sampled += range(first - entry.num_newest, first)
    return ScoredRows(
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(targets)),
        torch.tensor(sampled, dtype=torch.int64),
    )


def _num_scored(step: SequenceStep, sequence: WorkerSequence) -> int:
    """How many of a scored step's tokens have a next token in the prompt."""
    return min(step.start + step.num_tokens, sequence.num_prompt_tokens - 1) - step.start


class RowScorer:
    """Reads from vocab-parallel logits how likely tokens are. There is nothing to process, as before sampling."""

    def __init__(
        self, kernels: Kernels, spans: Sequence[Span], group: Collectives, logprobs_mode: LogprobsMode
    ) -> None:
        """`spans`: the vocabulary range of each rank of `group`."""
        self._kernels = kernels
        self._widths = [span.size for span in spans]
        self._group = group
        self._as_logits = logprobs_mode.endswith("logits")

    @property
    def rows_each(self) -> int:
        """How many rows may be scored at a time: this rank's logits and the gathered ones are alive together."""
        return max(1, _SCORED_LOGIT_BYTES // (4 * sum(self._widths) * min(self._group.size, 2)))

    def score_rows(self, local_logits: Tensor, targets: Tensor, wanted: Sequence[Wanted]) -> Reports:
        """What rows [R, local vocab] report of the tokens `targets` [R] and of others."""
        logits = self._group.all_gather_columns(local_logits, self._widths)
        return report(self._kernels, logits, targets, wanted, as_logits=self._as_logits)


class Scores(Feature):
    """Scores the tokens of prompts that ask for it."""

    step_fields = ("score",)

    def __init__(self, stage: DecoderStage, scorer: RowScorer) -> None:
        self._stage = stage
        self._scorer = scorer

    def begin(self, running: RunningStep) -> StepScores:
        running.greedy = False
        scores = StepScores(self._stage, self._scorer, plan_scoring(running.plan.steps, running.stepped))
        running.forward = scores.forward
        return scores


class StepScores(Feature):
    """The scores of one step."""

    def __init__(self, stage: DecoderStage, scorer: RowScorer, plan: ScoringPlan) -> None:
        self._stage = stage
        self._scorer = scorer
        self._plan = plan
        self._parts: list[tuple[slice, Reports]] = []
        """Those of some scored rows, and which rows these are."""
        self._places: list[slice] = []
        self._wanted = [one for one, count in zip(plan.wanted, plan.counts, strict=True) for _ in range(count)]

    def forward(self, step: StepInput, hidden: Tensor) -> Tensor:
        """The logits of the sampled rows. Those of scored rows are read meanwhile, some at a time."""
        scored = step.rows.narrow().scored
        assert scored is not None
        targets = scored.targets

        def read_logits(rows: slice, logits: Tensor) -> None:
            reports = self._scorer.score_rows(logits, targets[rows], self._wanted[rows])
            self._parts.append((rows, reports))

        return forward_scored(self._stage, step, hidden, self._scorer.rows_each, read_logits)

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        self._places = [running.download(*reports.list_tensors()) for _, reports in self._parts]

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        scores: list[TokenLogprobs | None] = []
        for (rows, _), place in zip(self._parts, self._places, strict=True):
            wanted = self._wanted[rows]
            # No tokens are named, so it is no matter which ones were scored.
            scores += read_reports(Reports.from_copies(running.copies[place]), wanted, [0] * len(wanted))
        return add_scores(results, self._plan, [one for one in scores if one is not None])


def forward_scored(
    stage: DecoderStage,
    step: StepInput,
    hidden: Tensor,
    rows_each: int,
    read_logits: Callable[[slice, Tensor], None],
) -> Tensor:
    """As `DecoderStage.forward`, of the last stage, for a step with scored tokens.

    `read_logits` gets this rank's logits of the scored rows, for at most `rows_each` of them at a time. The logits
    of the sampled rows are returned.
    """
    left = step.rows.narrow()
    scored = left.scored
    assert scored is not None
    hidden, delta = stage.run_stage(step, hidden)
    for first in range(0, len(scored.rows), rows_each):
        part = slice(first, first + rows_each)
        read_logits(part, _logits_of(stage, hidden, delta, scored.rows[part], left))
    if len(scored.sampled) == 0:
        return torch.empty(0, 0, device=hidden.device)
    return _logits_of(stage, hidden, delta, scored.sampled, left)


def _logits_of(stage: DecoderStage, hidden: Tensor, delta: Tensor | None, rows: Tensor, left: Rows) -> Tensor:
    """This rank's logits of some rows of the last layer's output; `left`: the table of all its rows."""
    assert stage.final_norm is not None
    assert stage.lm_head is not None
    own_delta = None if delta is None else torch.index_select(delta, 0, rows)
    normed, _ = stage.final_norm(torch.index_select(hidden, 0, rows), own_delta)
    logits = stage.lm_head(normed, left, rows)
    if stage.finite_checker is not None:
        assert left.places is not None
        stage.finite_checker.check_tensor("the logits", logits, left.places[rows])
    return logits


def add_scores(
    results: Sequence[SequenceResult], plan: ScoringPlan, scores: Sequence[TokenLogprobs]
) -> list[SequenceResult]:
    """`results` with the scores. A sequence that was only scored gets one without tokens."""
    by_id = {result.seq_id: result for result in results}
    entries = iter(scores)
    for seq_id, count in zip(plan.seq_ids, plan.counts, strict=True):
        result = by_id.get(seq_id, SequenceResult(seq_id, []))
        by_id[seq_id] = msgspec.structs.replace(result, prompt_logprobs=list(islice(entries, count)))
    return list(by_id.values())
