"""What a head reads of its model: what goes into some layers, or comes out of the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.runtime.layers.context import StageContext
from shardline.runtime.step import StepInput


class KeptOutput:
    """The residual stream [T, H] before some layers, of all rows of the step that ran last.

    Decode steps write it to the same memory, where recorded programs find it.
    """

    def __init__(self, stage: StageContext) -> None:
        """Its layers are `stage.kept_layers`; the number of layers of the model stands for what comes out of it."""
        self._kernels, self._layers = stage.kernels, stage.kept_layers
        self._last = len(stage.spec.layers)
        nothing = torch.empty(0, stage.spec.hidden_size, dtype=stage.dtype, device=stage.device)
        self._memory = dict.fromkeys(stage.kept_layers, nothing)
        self._rows = dict(self._memory)
        self._one = torch.ones(1, device=stage.device)

    def keep_memory(self, max_seqs: int) -> None:
        """Allocate the memory that decode steps of up to `max_seqs` rows share."""
        self._memory = {layer: memory.new_empty(max_seqs, memory.shape[1]) for layer, memory in self._memory.items()}

    def keep_input(self, layer: int, step: StepInput, hidden: Tensor, delta: Tensor | None) -> None:
        """Keep hidden + delta [T, H], which goes into a layer, if it is one of those."""
        if layer in self._memory:
            self._keep(layer, step, hidden, delta)

    def keep_output(self, step: StepInput, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Keep what comes out of the last layer, if it is read. Returns it for the rows that go on."""
        if self._last not in self._memory:
            return hidden, delta
        return step.rows.narrow().take(self._keep(self._last, step, hidden, delta)), None

    def _keep(self, layer: int, step: StepInput, hidden: Tensor, delta: Tensor | None) -> Tensor:
        out = self._memory[layer][: len(hidden)] if step.is_replayable else torch.empty_like(hidden)
        if delta is None:
            self._kernels.scale_rows(hidden, self._one, None, out)
        else:
            self._kernels.add(hidden, delta, out)
        self._rows[layer] = out
        return out

    def rows_of(self, step: StepInput) -> Tensor:
        """[T, H * layers]: what was kept of a step, which may have been replayed; one layer's beside the other's."""
        source, count = (self._memory, len(step.rows)) if step.is_replayable else (self._rows, None)
        kept = [source[layer][:count] for layer in self._layers]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)
