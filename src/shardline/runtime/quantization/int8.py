"""W8A8: weights in int8 with a scale per output, activations quantized to int8 row by row as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.ops.experts import ExpertWeights
from shardline.runtime.ops.gated_linear import gated_linear_int8, pack_gate_up_int8
from shardline.runtime.ops.linear_argmax import linear_int8_argmax
from shardline.runtime.ops.linear_input import InputForm, LinearInput, as_quantized
from shardline.runtime.ops.linear_int8 import Int8Weight, int8_empty, linear_int8, pack_int8


@dataclass(frozen=True)
class Int8Linear:
    """See `base.PackedLinear`."""

    takes: ClassVar[InputForm] = "quantized"
    weight: Int8Weight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear_int8(as_quantized(x), self.weight, bias, out_dtype=out_dtype or x.dtype)

    def argmax(self, x: LinearInput, bias: Tensor | None = None) -> Tensor:
        """See `base.PackedLMHead`."""
        return linear_int8_argmax(as_quantized(x), self.weight, bias)


@dataclass(frozen=True)
class Int8GatedLinear:
    """See `base.PackedGatedLinear`."""

    takes: ClassVar[InputForm] = "quantized"
    weight: Int8Weight
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: ActivationName) -> Tensor:
        return gated_linear_int8(as_quantized(x), self.weight, self.width, bias, activation, out_dtype=x.dtype)


def pack(*parts: Tensor) -> Int8Linear:
    """See `base.Quantization.pack`."""
    return Int8Linear(pack_int8(*parts))


def pack_gated(gate: Tensor, up: Tensor) -> Int8GatedLinear:
    """See `base.Quantization.pack_gated`."""
    return Int8GatedLinear(pack_gate_up_int8(gate, up), len(gate))


def allocate_experts(num_experts: int, *parts: Tensor) -> ExpertWeights:
    """See `base.Quantization.allocate_experts`."""
    out_features = sum(len(part) for part in parts)
    panels, scales = int8_empty(parts[0], num_experts, out_features=out_features)
    return ExpertWeights(panels, scales, parts[0].shape[1], out_features)


def pack_expert(experts: ExpertWeights, index: int, *parts: Tensor) -> None:
    """See `base.Quantization.pack_expert`."""
    assert experts.scales is not None
    pack_int8(*parts, panels=experts.panels[index], scales=experts.scales[index])


pack_lm_head = pack
