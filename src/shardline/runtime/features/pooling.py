"""Embeddings of prompts: what leaves the last stage for their last tokens, or for all of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.messages.step import SequenceResult
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.step import StepInput


class Pooling(Feature):
    """Reports the last stage's output, [R, size], as float32: final hidden states, or the logits of a classifier."""

    def __init__(self) -> None:
        self._place = slice(0, 0)

    def begin(self, running: RunningStep) -> Pooling | None:
        return Pooling() if running.plan.num_samples else None

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        self._place = running.download(output.float())

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        (states,) = running.copies[self._place]
        steps = [step for step in running.plan.steps if step.num_samples]
        parts = torch.split(states, [step.num_samples for step in steps])
        return [
            SequenceResult(step.seq_id, [], embedding=part.numpy().tobytes())
            for step, part in zip(steps, parts, strict=True)
        ]
