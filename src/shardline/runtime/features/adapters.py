"""Adapters (LoRA): which one changes each row of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.step import StepInput


class RowAdapters(Feature):
    """Fills the column of adapters of a step's rows, if any of its sequences has one."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        """`max_rows`: rows of the largest step that can be replayed. Such steps share memory."""
        self._memory = torch.empty(max_rows, dtype=torch.int32)
        self._device = device

    def begin(self, running: RunningStep) -> RowAdapters | None:
        return self if any(sequence.adapter >= 0 for sequence in running.stepped) else None

    def prepare(self, running: RunningStep, step: StepInput) -> StepInput:
        counts = [entry.num_tokens for entry in running.plan.steps]
        slots = np.repeat(np.array([sequence.adapter for sequence in running.stepped], dtype=np.int32), counts)
        column = torch.from_numpy(slots).to(self._device)
        if step.is_replayable:
            column = self._memory[: len(slots)].copy_(column)
        return replace(step, rows=step.rows.with_adapters(column))
