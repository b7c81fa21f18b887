"""The output of a model's last layer, kept for a head that reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.runtime.layers.context import StageContext
from shardline.runtime.step import StepInput


class KeptOutput:
    """The residual stream [T, H] behind the last layer, of all rows of the step that ran last.

    Decode steps write it to the same memory, where recorded programs find it.
    """

    def __init__(self, stage: StageContext) -> None:
        self._kernels = stage.kernels
        self._memory = torch.empty(0, stage.spec.hidden_size, dtype=stage.dtype, device=stage.device)
        self._rows = self._memory
        self._one = torch.ones(1, device=stage.device)

    def keep_memory(self, max_seqs: int) -> None:
        """Allocate the memory that decode steps of up to `max_seqs` rows share."""
        self._memory = self._memory.new_empty(max_seqs, self._memory.shape[1])

    def keep(self, step: StepInput, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, None]:
        """Keep hidden + delta [T, H]. Returns it for the rows that go on."""
        out = self._memory[: len(hidden)] if step.is_replayable else torch.empty_like(hidden)
        if delta is None:
            self._kernels.scale_rows(hidden, self._one, None, out)
        else:
            self._kernels.add(hidden, delta, out)
        self._rows = out
        return step.rows.narrow().take(out), None

    def rows_of(self, step: StepInput) -> Tensor:
        """[T, H]: what `keep` has kept of a step, which may have been replayed."""
        return self._memory[: len(step.rows)] if step.is_replayable else self._rows
