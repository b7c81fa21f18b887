"""The lm_head, vocab-parallel: each rank computes the logits of its own rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardline.runtime.layers.context import LayerContext
from shardline.runtime.ops.linear_input import InputForm, LinearInput
from shardline.runtime.ops.softcap import softcap_
from shardline.runtime.quantization.none import PlainLinear


class LMHead:
    """hidden [R, hidden_size] -> this rank's columns of the fp32 logits [R, vocab_size]."""

    def __init__(self, context: LayerContext) -> None:
        spec = context.spec
        name = "embed.weight" if spec.tied_embeddings else "lm_head.weight"
        self.spans = context.spans(name)
        """Vocabulary range of each rank."""
        self._linear = context.pack_lm_head(context.read(name))
        self._bias = context.load("lm_head.bias") if spec.lm_head_bias else None
        self._softcap = spec.logits_softcap

    @property
    def rows(self) -> Callable[[Tensor], Tensor] | None:
        """Looks rows up in the weight by their index in this rank's range; None where quantization has changed them."""
        return self._linear.weight.rows if isinstance(self._linear, PlainLinear) else None

    @property
    def takes(self) -> InputForm:
        """What the hidden states may be besides a tensor."""
        return "quantized" if self._linear.takes == "quantized" else "tensor"

    def __call__(self, hidden: LinearInput) -> Tensor:
        logits = self._linear(hidden, self._bias, out_dtype=torch.float32)
        if self._softcap is not None:
            softcap_(logits, self._softcap)
        return logits

    @property
    def finds_best(self) -> bool:
        """Whether `best` is there. A softcap rounds logits to equal ones, so that it takes all of them."""
        return self._softcap is None

    def best(self, hidden: LinearInput) -> Tensor:
        """The largest of this rank's logits of each row, and the bits of its index in this rank's range: [R, 2]."""
        assert self.finds_best
        return self._linear.argmax(hidden, self._bias)
