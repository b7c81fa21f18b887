"""Digests of the logits from which tokens are sampled, by which two runs are compared bit by bit."""

from __future__ import annotations

import hashlib

import msgspec
from torch import Tensor

from shardline.messages.step import SequenceResult
from shardline.runtime.features.base import Feature, RunningStep


class Digests(Feature):
    """Reports the digest of each row that asks for it."""

    def begin(self, running: RunningStep) -> StepDigests | None:
        if running.sampling is None or running.sampling.is_greedy:
            return None
        rows = [row for row, sequence in enumerate(running.rows) if sequence.sampling.logits_digest]
        return StepDigests(running, rows) if rows else None


class StepDigests(Feature):
    """The digests of one step."""

    def __init__(self, running: RunningStep, rows: list[int]) -> None:
        """`rows`: those of the sampled rows whose digest is wanted."""
        self._rows = rows
        self._place = slice(0, 0)
        running.readers.append(lambda logits: self._read(running, logits))

    def _read(self, running: RunningStep, logits: Tensor) -> None:
        self._place = running.download(*(logits[row].clone() for row in self._rows))

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        for row, logits in zip(self._rows, running.copies[self._place], strict=True):
            digest = hashlib.blake2b(logits.numpy().tobytes(), digest_size=8).hexdigest()
            results[row] = msgspec.structs.replace(results[row], digests=[digest])
        return results
