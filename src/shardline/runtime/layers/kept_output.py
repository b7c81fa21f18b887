"""What a head reads of its model: what goes into some layers, or comes out of the last one.

Each stage sends on what it and those before it have kept, so the last stage has all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.runtime.layers.context import StageContext
from shardline.runtime.parallel.collectives import StageLink
from shardline.runtime.step import StepInput


class KeptOutput:
    """The residual stream [T, H] before some layers, of all rows of the step that ran last.

    Decode steps write it to the same memory, where recorded programs find it.
    """

    def __init__(self, stage: StageContext, start: int, stop: int) -> None:
        """Its layers are `stage.kept_layers`; the number of layers of the model stands for what comes out of it. This
        stage keeps those from `start` to before `stop`, and gets those before `start` from the previous stage."""
        self._kernels, self._layers = stage.kernels, stage.kept_layers
        self._last = len(stage.spec.layers)
        here = sorted({layer for layer in stage.kept_layers if layer < stop})
        nothing = torch.empty(0, stage.spec.hidden_size, dtype=stage.dtype, device=stage.device)
        self._rows = dict.fromkeys(here, nothing)
        self._received = [layer for layer in here if layer < start]
        self._memory = {layer: nothing for layer in here if layer >= start}
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

    def receive(self, previous: StageLink | None, step: StepInput) -> None:
        """Take what the previous stage sends, before the hidden states of a step."""
        for layer in self._received:
            assert previous is not None
            nothing = self._rows[layer]
            self._rows[layer] = previous.receive((len(step.rows), nothing.shape[1]), nothing.dtype)

    def send(self, following: StageLink, step: StepInput) -> None:
        """Send what the following stages need of a step that has run."""
        for layer in self._rows:
            following.send(self._kept(layer, step))

    def rows_of(self, step: StepInput) -> Tensor:
        """[T, H * layers]: what was kept of a step, which may have been replayed; one layer's beside the other's."""
        kept = [self._kept(layer, step) for layer in self._layers]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)

    def _kept(self, layer: int, step: StepInput) -> Tensor:
        replayed = step.is_replayable and layer in self._memory
        return self._memory[layer][: len(step.rows)] if replayed else self._rows[layer]
