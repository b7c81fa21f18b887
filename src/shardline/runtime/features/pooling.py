"""Embeddings of prompts: the final hidden states of their last tokens, as they leave the last stage."""

from __future__ import annotations

from torch import Tensor

from shardline.messages.step import SequenceResult
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.step import StepInput


class Pooling(Feature):
    """Reports the last stage's output, [R, H], as float32."""

    def __init__(self) -> None:
        self._place = slice(0, 0)

    def begin(self, running: RunningStep) -> Pooling | None:
        return Pooling() if running.sampled else None

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        self._place = running.download(output.float())

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        (states,) = running.copies[self._place]
        rows = zip(running.sampled, states, strict=True)
        return [SequenceResult(sequence.seq_id, [], embedding=row.numpy().tobytes()) for sequence, row in rows]
