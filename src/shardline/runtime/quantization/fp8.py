"""W8A8 in fp8 (e4m3), on GPUs only: a scale per output and per row of activations; the lm_head is int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.ops.experts import ExpertWeights
from shardline.runtime.ops.linear_fp8 import Fp8Weight, linear_fp8, pack_fp8
from shardline.runtime.ops.linear_input import InputForm, LinearInput, as_tensor
from shardline.runtime.ops.storage import stacked_rows
from shardline.runtime.quantization import int8


@dataclass(frozen=True)
class Fp8Linear:
    """See `base.PackedLinear`."""

    takes: ClassVar[InputForm] = "tensor"
    weight: Fp8Weight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear_fp8(as_tensor(x), self.weight, bias, out_dtype=out_dtype)


def pack(*parts: Tensor) -> Fp8Linear:
    """See `base.Quantization.pack`."""
    return Fp8Linear(pack_fp8(stacked_rows(parts)))


@dataclass(frozen=True)
class Fp8GatedLinear:
    """See `base.PackedGatedLinear`."""

    takes: ClassVar[InputForm] = "tensor"
    both: Fp8Linear

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.both.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: ActivationName) -> Tensor:
        return linear_fp8(as_tensor(x), self.both.weight, bias, gate=activation)


def pack_gated(gate: Tensor, up: Tensor) -> Fp8GatedLinear:
    """See `base.Quantization.pack_gated`."""
    return Fp8GatedLinear(pack(gate, up))


def allocate_experts(num_experts: int, *parts: Tensor) -> ExpertWeights:
    """See `base.Quantization.allocate_experts`."""
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    values = parts[0].new_empty(num_experts, out_features, in_features, dtype=torch.float8_e4m3fn)
    scales = parts[0].new_empty(num_experts, out_features, dtype=torch.float32)
    return ExpertWeights(values, scales, in_features, out_features)


def pack_expert(experts: ExpertWeights, index: int, *parts: Tensor) -> None:
    """See `base.Quantization.pack_expert`."""
    assert experts.scales is not None
    packed = pack_fp8(stacked_rows(parts))
    experts.panels[index].copy_(packed.values)
    experts.scales[index].copy_(packed.scales)


# Errors in the logits are not averaged out by later layers.
pack_lm_head = int8.pack
