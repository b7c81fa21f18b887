"""W4A8: weights in 4 bits with scales per output and 32 inputs, activations in int8; the lm_head is int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.ops.experts import ExpertWeights
from shardline.runtime.ops.gated_linear import gated_linear_int4, pack_gate_up_int4
from shardline.runtime.ops.linear_input import InputForm, LinearInput, as_quantized
from shardline.runtime.ops.linear_int4 import Int4Weight, int4_empty, linear_int4, pack_int4
from shardline.runtime.quantization import int8


@dataclass(frozen=True)
class Int4Linear:
    """See `base.PackedLinear`."""

    takes: ClassVar[InputForm] = "quantized"
    weight: Int4Weight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear_int4(as_quantized(x), self.weight, bias, out_dtype=out_dtype or x.dtype)


@dataclass(frozen=True)
class Int4GatedLinear:
    """See `base.PackedGatedLinear`."""

    takes: ClassVar[InputForm] = "quantized"
    weight: Int4Weight
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: ActivationName) -> Tensor:
        return gated_linear_int4(as_quantized(x), self.weight, self.width, bias, activation, out_dtype=x.dtype)


def pack(*parts: Tensor) -> Int4Linear:
    """See `base.Quantization.pack`."""
    return Int4Linear(pack_int4(*parts))


def pack_gated(gate: Tensor, up: Tensor) -> Int4GatedLinear:
    """See `base.Quantization.pack_gated`."""
    return Int4GatedLinear(pack_gate_up_int4(gate, up), len(gate))


def allocate_experts(num_experts: int, *parts: Tensor) -> ExpertWeights:
    """See `base.Quantization.allocate_experts`."""
    out_features = sum(len(part) for part in parts)
    panels, scales = int4_empty(parts[0], num_experts, out_features=out_features)
    return ExpertWeights(panels, scales, parts[0].shape[1], out_features)


def pack_expert(experts: ExpertWeights, index: int, *parts: Tensor) -> None:
    """See `base.Quantization.pack_expert`."""
    assert experts.scales is not None
    pack_int4(*parts, panels=experts.panels[index], scales=experts.scales[index])


# Errors in the logits are not averaged out by later layers.
pack_lm_head = int8.pack
