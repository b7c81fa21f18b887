"""The token embedding and the lm_head, vocab-parallel: each rank owns a range of the vocabulary.

A rank sends the rows of the embedding that a step needs, and computes the logits of its own range. A model that
classifies has a small head instead, which every rank has whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.ops.sampling.softcap import softcap_
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import GivenRows, Rows
from shardline.weights.formats import plain


class TokenEmbedding:
    """token ids [T] (and positions, if position embeddings are learned) -> [T, hidden_size] on every rank."""

    def __init__(self, loader: LayerLoader, look_up_rows: Callable[[Tensor], Tensor] | None) -> None:
        """`look_up_rows`: returns rows of this rank's part of the table, if a tied lm_head already holds them."""
        stage = loader.stage
        self._group = stage.group
        self._look_up = look_up_rows or loader.load_rows("embed.weight")
        spans = stage.spans("embed.weight")
        self._start, self._last = spans[stage.group.rank].start, spans[stage.group.rank].size - 1
        self._stops = torch.tensor([span.stop for span in spans], device=stage.device)
        # Gemma rounds the factor itself to the activations' dtype before it multiplies.
        scale = stage.spec.embedding_scale
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=stage.dtype, device=stage.device)
        self._positions = loader.load("positions.weight") if stage.spec.learned_positions else None

    def __call__(self, token_ids: Tensor, table: Rows, given: GivenRows | None = None) -> Tensor:
        """`given`: rows in place of some tokens', as they are: no factor scales them."""
        hidden = self._rows(token_ids, table)
        if self._scale is not None:
            hidden = hidden * self._scale
        if given is not None:
            hidden = hidden.index_copy_(0, given.places, given.rows)
        if self._positions is not None:
            hidden = hidden + self._positions[table.positions]
        return hidden

    def _rows(self, token_ids: Tensor, table: Rows) -> Tensor:
        return self._gather(token_ids, self._look_up)

    def _gather(self, token_ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        if self._group.size == 1:
            return look_up(token_ids)
        # Every rank sends a row for every token, so that no rank waits to learn how many tokens the others own.
        count = len(token_ids)
        owners = torch.bucketize(token_ids, self._stops, right=True)
        own_rows = look_up((token_ids - self._start).clamp_(0, self._last))
        gathered = self._group.all_gather_rows(own_rows, [count] * self._group.size)
        return torch.index_select(gathered, 0, owners * count + torch.arange(count, device=token_ids.device))


class LMHead:
    """hidden [R, hidden_size] -> this rank's columns of the fp32 logits [R, vocab_size]."""

    def __init__(self, loader: LayerLoader) -> None:
        stage = loader.stage
        name = "embed.weight" if stage.spec.tied_embeddings else "lm_head.weight"
        self.group, self.spans = stage.group, stage.spans(name)
        """The ranks that share the vocabulary, and the range of each."""
        self._kernels = stage.kernels
        self._dtype = stage.dtype
        self._packed = loader.pack_lm_head(name)
        self._bias = loader.load("lm_head.bias") if stage.spec.lm_head_bias else None
        self._softcap = stage.spec.logits_softcap
        scale = stage.spec.logits_scale
        self._scale = None if scale == 1.0 else torch.tensor([scale], device=stage.device)
        self.fuses_argmax = (
            stage.backend.fuses_argmax and stage.finite_checker is None and self._softcap is None and scale == 1.0
        )
        """Whether `find_best` serves greedy steps. A softcap or a scale may round different logits to equal values, so
        they need all logits; so does the search for NaN."""

    @property
    def look_up_rows(self) -> Callable[[Tensor], Tensor] | None:
        """A function that returns rows of the weight by their index in this rank's range; None if the format does not
        keep them unchanged."""
        return self._packed.row_reader(self._dtype)

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads hidden states best."""
        return self._packed.input_form

    def __call__(self, hidden: LinearInput, table: Rows, chosen: Tensor | None = None) -> Tensor:
        """`table`: has a row for each of `hidden`; `chosen`: which of its rows these are, if they are not all."""
        return self._finish(self._packed(hidden, self._bias, out_dtype=torch.float32))

    def _finish(self, logits: Tensor) -> Tensor:
        if self._softcap is not None:
            softcap_(self._kernels, logits, self._softcap)
        return logits if self._scale is None else scale_rows(self._kernels, logits, self._scale)

    def find_best(self, hidden: LinearInput, allowed: Tensor | None = None) -> Tensor:
        """[R, 2]: the largest of this rank's logits in each row, and the bits of its index in this rank's range.

        `allowed`: the tokens that each row may have, see `StepInput.allowed`.
        """
        assert self._softcap is None
        return self._packed.argmax(hidden, self._bias, allowed)


class Classifier:
    """hidden [R, hidden_size] -> fp32 logits [R, labels]; its weight is never quantized."""

    def __init__(self, loader: LayerLoader) -> None:
        self._linear = plain.Format().pack_linear(loader.stage.kernels, loader.read("classifier.weight"))
        loader.on_loaded(self._linear.nbytes)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden, out_dtype=torch.float32)
