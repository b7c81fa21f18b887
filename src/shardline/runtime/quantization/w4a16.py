"""W4A16: a GPTQ or AWQ checkpoint's own 4 bits, on GPUs; what it has not packed, the lm_head and experts are dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardline.runtime.ops.activation import ActivationName, gated_activation
from shardline.runtime.ops.grouped_weight import GroupedWeight, stacked_weights
from shardline.runtime.ops.linear_input import InputForm, LinearInput, as_tensor
from shardline.runtime.ops.linear_w4a16 import W4A16Weight, linear_w4a16, pack_w4a16
from shardline.runtime.quantization import none
from shardline.runtime.quantization.base import PackedGatedLinear, PackedLinear


@dataclass(frozen=True)
class W4A16Linear:
    """See `base.PackedLinear`."""

    takes: ClassVar[InputForm] = "tensor"
    weight: W4A16Weight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear_w4a16(as_tensor(x), self.weight, bias, out_dtype=out_dtype)


@dataclass(frozen=True)
class W4A16GatedLinear:
    """See `base.PackedGatedLinear`."""

    takes: ClassVar[InputForm] = "tensor"
    both: W4A16Linear

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.both.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: ActivationName) -> Tensor:
        return gated_activation(self.both(x, bias), activation)


def pack(*parts: Tensor | GroupedWeight) -> PackedLinear:
    """See `base.Quantization.pack`."""
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if not grouped:
        return none.pack(*(part for part in parts if isinstance(part, Tensor)))
    assert len(grouped) == len(parts), "parts are packed alike"
    return W4A16Linear(pack_w4a16(stacked_weights(grouped)))


def pack_gated(gate: Tensor | GroupedWeight, up: Tensor | GroupedWeight) -> PackedGatedLinear:
    """See `base.Quantization.pack_gated`."""
    if isinstance(gate, GroupedWeight) and isinstance(up, GroupedWeight):
        return W4A16GatedLinear(W4A16Linear(pack_w4a16(stacked_weights([gate, up]))))
    assert isinstance(gate, Tensor), "a checkpoint packs both or none"
    assert isinstance(up, Tensor), "a checkpoint packs both or none"
    return none.pack_gated(gate, up)


allocate_experts, pack_expert, pack_lm_head = none.allocate_experts, none.pack_expert, none.pack_lm_head
