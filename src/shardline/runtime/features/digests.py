"""Digests of the logits from which tokens are sampled, by which two runs are compared bit by bit."""

from __future__ import annotations

import msgspec
import numpy as np
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.messages.step import SequenceResult
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.ops.sampling.row_digests import row_digests


class Digests(Feature):
    """Reports the digest of each row that asks for it."""

    start_fields = ("sampling.logits_digest",)

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def begin(self, running: RunningStep) -> StepDigests | None:
        if running.sampling is None or running.sampling.is_greedy:
            return None
        rows = [row for row, sequence in enumerate(running.rows) if sequence.sampling.logits_digest]
        if not rows:
            return None
        digests = StepDigests(self._kernels, rows)
        running.readers.append(digests.read)
        return digests


class StepDigests(Feature):
    """The digests of one step."""

    def __init__(self, kernels: Kernels, rows: list[int]) -> None:
        """`rows`: those of the sampled rows whose digest is wanted."""
        self._kernels = kernels
        self._rows = rows
        self._place = slice(0, 0)

    def read(self, running: RunningStep, logits: Tensor) -> None:
        """Digest the logits [R, V] of the sampled rows."""
        self._place = running.download(row_digests(self._kernels, logits))

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        (digests,) = running.copies[self._place]
        values = digests.numpy().view(np.uint64).tolist()
        for row in self._rows:
            results[row] = msgspec.structs.replace(results[row], digests=[f"{values[row]:016x}"])
        return results
