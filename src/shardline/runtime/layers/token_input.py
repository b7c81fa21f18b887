"""What layers read of each token itself, beside the residual stream (see `spec.TokenInput`).

A stage computes the inputs of all its layers before they run, from the token ids. Ranks hold some elements of each
input. The projection is whole on every rank, because its norm needs whole rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from shardline.models.partition import Span
from shardline.models.spec import DecoderSpec, TokenInput
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.linear import ClosingLinear
from shardline.runtime.layers.norm import NormLayer
from shardline.runtime.layers.vocabulary import TokenEmbedding
from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.step import Rows, StepInput
from shardline.weights.formats import plain


class TokenInputs:
    """The inputs of a stage's layers: token ids [T] -> [T, layers, 2, local size].

    The second of two holds the inputs. Each layer writes its gate to the first.
    """

    def __init__(self, loader: LayerLoader, layers: Span, spec: DecoderSpec, embedding: TokenEmbedding) -> None:
        stage, token_input = loader.stage, spec.token_input
        assert token_input is not None
        self._kernels, self._embedding = stage.kernels, embedding
        names = [f"layers.{index}.token_input" for index in range(layers.start, layers.stop)]
        self._own = stage.spans(f"{names[0]}.embed.weight")[stage.group.rank]
        self._tables = [loader.load(f"{name}.embed.weight") for name in names]
        weights = [loader.read(f"{name}.projection.weight") for name in names]
        self._projection = plain.Format().pack_linear(stage.kernels, *weights)
        loader.on_loaded(self._projection.nbytes)
        self._norm = NormLayer(loader, "token_input_norm", token_input.norm)
        self._row_factor = torch.tensor(token_input.size**0.5, dtype=stage.dtype, device=stage.device)
        self._projection_factor = spec.hidden_size**-0.5
        self._shape = len(names), token_input.size
        self._memory = torch.empty(0, dtype=stage.dtype, device=stage.device)

    def add_to(self, step: StepInput, embedded: Tensor | None) -> StepInput:
        """The step with its inputs. `embedded`: the token embeddings [T, hidden], if they are known.

        Steps that are replayed have their inputs in the same memory.
        """
        if embedded is None:
            embedded = self._embedding(step.token_ids, step.rows)
        projected = (self._projection(embedded) * self._projection_factor).view(-1, *self._shape)
        projected = self._norm(projected)[:, :, self._own.start : self._own.stop]
        rows = torch.stack([torch.index_select(table, 0, step.token_ids) for table in self._tables], 1)
        memory = self._memory_for(step, rows)
        torch.mul(projected + rows * self._row_factor, 2.0**-0.5, out=memory[:, :, 1])
        return dataclasses.replace(step, rows=with_inputs(step.rows, memory))

    def _memory_for(self, step: StepInput, rows: Tensor) -> Tensor:
        count, layers, size = rows.shape
        if not step.is_replayable:
            return rows.new_empty(count, layers, 2, size)
        return self._memory[:count]

    def keep_memory(self, max_seqs: int) -> None:
        """Allocate the memory that decode steps share, for up to `max_seqs` sequences."""
        self._memory = self._memory.new_empty(max_seqs, self._shape[0], 2, self._own.size)


class TokenInputBlock:
    """norm(down(act(gate(x)) * input)) for the residual stream x [T, hidden]."""

    def __init__(self, loader: LayerLoader, name: str, spec: TokenInput) -> None:
        self._kernels = loader.stage.kernels
        self._activation = spec.activation
        self._gate = plain.Format().pack_linear(self._kernels, loader.read(f"{name}.gate.weight"))
        loader.on_loaded(self._gate.nbytes)
        widths = [span.size for span in loader.stage.spans(f"{name}.gate.weight")]
        self._down = ClosingLinear(loader, f"{name}.down", widths, bias=False)
        self._norm = NormLayer(loader, f"{name}.norm", spec.norm)

    def __call__(self, hidden: Tensor, gated: Tensor, rows: Rows) -> Tensor:
        """`gated` [T, 2, local size]: memory for the gate, then the layer's inputs."""
        self._kernels.linear(hidden, self._gate.panels, None, gated[:, 0])
        return self._norm(self._down(gated_activation(self._kernels, gated.flatten(1), self._activation), rows))


def with_inputs(rows: Rows, token_inputs: Tensor) -> Rows:
    """The same table with `Rows.token_inputs` of all rows."""
    narrowed = rows.narrowed
    if narrowed is not None:
        narrowed = dataclasses.replace(narrowed, token_inputs=narrowed.take(token_inputs))
    return dataclasses.replace(rows, token_inputs=token_inputs, narrowed=narrowed)
