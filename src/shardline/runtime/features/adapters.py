"""Adapters (LoRA): which one changes each row of a step."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.layers.adapted_vocabulary import AdaptedLMHead
from shardline.runtime.layers.vocabulary import LMHead
from shardline.runtime.step import Rows, StepInput


class RowAdapters(Feature):
    """Fills the column of adapters of a step's rows, if any of its sequences has one."""

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        head: LMHead | None,
        scaling_slots: Set[int],
        expert_slots: Set[int],
    ) -> None:
        """`max_rows`: rows of the largest step that can be replayed. Such steps share memory. The slots are those whose
        adapters have factors of outputs (DoRA), and those whose adapters change experts."""
        self._memory = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._device = device
        self._scaling_slots, self._expert_slots = scaling_slots, expert_slots
        self._head = head.adapters if isinstance(head, AdaptedLMHead) else None

    def begin(self, running: RunningStep) -> RowAdapters | None:
        slots = {sequence.adapter for sequence in running.stepped if sequence.adapter >= 0}
        if self._head is not None and any(self._head.changes[slot] for slot in slots):
            running.greedy = False  # the search for the best token adds nothing to logits
        return self if slots else None

    def prepare(self, running: RunningStep, step: StepInput) -> StepInput:
        counts = [entry.num_tokens for entry in running.plan.steps]
        slots = np.repeat(np.array([sequence.adapter for sequence in running.stepped], dtype=np.int32), counts)
        column = torch.from_numpy(slots).to(self._device)
        own = {sequence.adapter for sequence in running.stepped if sequence.adapter >= 0}
        scaled, experts = not own.isdisjoint(self._scaling_slots), not own.isdisjoint(self._expert_slots)
        if step.is_replayable:
            column = self._memory[: len(slots)].copy_(column)
            if self._head is not None and any(self._head.wholes[slot] is not None for slot in own):
                step = replace(step, is_replayable=False)
        return replace(step, rows=_with_adapters(step.rows, column, scaled=scaled, adapts_experts=experts))


def _with_adapters(rows: Rows, adapters: Tensor, *, scaled: bool, adapts_experts: bool) -> Rows:
    """The same table with `Rows.adapters` of all rows."""
    narrowed = rows.narrowed
    if narrowed is not None:
        taken = narrowed.take(adapters)
        narrowed = _with_adapters(narrowed, taken, scaled=scaled, adapts_experts=adapts_experts)
    return replace(rows, adapters=adapters, scaled=scaled, adapts_experts=adapts_experts, narrowed=narrowed)
