"""`--check-finite`: report where NaN or Inf first appears, instead of sampling tokens from it."""

from __future__ import annotations

import logging

import msgspec
import torch
from torch import Tensor

from shardline.messages.step import SequenceResult, StepPlan
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.step import StepInput

_log = logging.getLogger(__name__)


class FiniteChecker:
    """Checks the output of each layer of a rank's stage, and keeps for every token the first place that is not finite.

    NaN spreads through the residual stream to later layers, and through attention to later tokens. So a sequence's
    first place is in the earliest layer of the earliest stage.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._places: list[str] = []
        self._first = torch.empty(0, dtype=torch.int64)

    def begin_step(self, num_tokens: int) -> None:
        """Begin a step of `num_tokens`."""
        self._places = []
        self._first = torch.full((num_tokens,), -1)

    def check_tensor(self, place: str, x: Tensor, rows: Tensor | None = None) -> None:
        """Check `x` [R, N], computed at `place` for the tokens `rows` [R] of the step (None: for all tokens)."""
        self._places.append(place)
        wrong = ~torch.isfinite(x).all(1).cpu()
        tokens = torch.arange(len(self._first)) if rows is None else rows.cpu()
        found = tokens[wrong & (self._first[tokens] < 0)]
        self._first[found] = len(self._places) - 1

    def report_step(self, plan: StepPlan) -> dict[int, str]:
        """For each sequence of the step that is not finite, the place where it began; each is also logged."""
        if not bool((self._first >= 0).any()):
            return {}
        errors = {}
        start = 0
        for step in plan.steps:
            first = self._first[start : start + step.num_tokens]
            start += step.num_tokens
            found = torch.nonzero(first >= 0).flatten()
            if len(found) == 0:
                continue
            earliest = int(found[first[found].argmin()])
            place = self._places[int(first[earliest])]
            errors[step.seq_id] = f"NaN or Inf in {place} on rank {self._rank}, at position {step.start + earliest}"
            _log.error("step %d, sequence %d: %s", plan.step_id, step.seq_id, errors[step.seq_id])
        return errors


class Finite(Feature):
    """Ends the sequences in which a rank's checker has found NaN or Inf."""

    def __init__(self, checker: FiniteChecker) -> None:
        self._checker = checker
        self._errors: dict[int, str] = {}
        """By sequence."""

    def begin(self, running: RunningStep) -> Finite:
        return Finite(self._checker)

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        self._errors = self._checker.report_step(running.plan)

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        errors = self._errors
        return [
            msgspec.structs.replace(result, error=errors[result.seq_id], refused=False)
            if result.seq_id in errors
            else result
            for result in results
        ]
