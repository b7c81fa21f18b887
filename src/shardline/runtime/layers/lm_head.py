"""The lm_head, vocab-parallel: each rank computes the logits of its own rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.ops.sampling.softcap import softcap_
from shardline.weights.formats.plain import PlainLinear
from shardline.weights.rows import InputForm, LinearInput


class LMHead:
    """hidden [R, hidden_size] -> this rank's columns of the fp32 logits [R, vocab_size]."""

    def __init__(self, loader: LayerLoader) -> None:
        stage = loader.stage
        name = "embed.weight" if stage.spec.tied_embeddings else "lm_head.weight"
        self.spans = stage.spans(name)
        """Vocabulary range of each rank."""
        self._kernels = stage.kernels
        self._packed = loader.pack_lm_head(name)
        self._bias = loader.load("lm_head.bias") if stage.spec.lm_head_bias else None
        self._softcap = stage.spec.logits_softcap
        self.fuses_argmax = stage.backend.fuses_argmax and stage.watch is None and self._softcap is None
        """Whether `find_best` serves greedy steps. A softcap may round different logits to equal values, so it needs
        all logits; so does the search for NaN."""

    @property
    def look_up_rows(self) -> Callable[[Tensor], Tensor] | None:
        """A function that returns rows of the weight by their index in this rank's range; None if the format does not
        keep them unchanged."""
        return self._packed.unpack_rows if isinstance(self._packed, PlainLinear) else None

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads hidden states best."""
        return self._packed.input_form

    def __call__(self, hidden: LinearInput) -> Tensor:
        logits = self._packed(hidden, self._bias, out_dtype=torch.float32)
        if self._softcap is not None:
            softcap_(self._kernels, logits, self._softcap)
        return logits

    def find_best(self, hidden: LinearInput) -> Tensor:
        """[R, 2]: the largest of this rank's logits in each row, and the bits of its index in this rank's range."""
        assert self._softcap is None
        return self._packed.argmax(hidden, self._bias)
