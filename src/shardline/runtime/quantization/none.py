"""Weights in the activations' dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.experts import ExpertWeights
from shardline.runtime.ops.few_rows import unnormed_linear
from shardline.runtime.ops.gated_linear import gated_linear, pack_gate_up
from shardline.runtime.ops.linear import PackedWeight, linear, pack_weight, panel_shape
from shardline.runtime.ops.linear_argmax import linear_argmax
from shardline.runtime.ops.linear_input import InputForm, LinearInput, UnnormedRows, as_tensor
from shardline.runtime.ops.storage import streamed_empty


@dataclass(frozen=True)
class PlainLinear:
    """See `base.PackedLinear`."""

    takes: ClassVar[InputForm] = "unnormed"
    weight: PackedWeight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.panels.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(x, UnnormedRows):
            return unnormed_linear(x, self.weight, bias, out_dtype=out_dtype)
        return linear(as_tensor(x), self.weight, bias, out_dtype=out_dtype)

    def argmax(self, x: LinearInput, bias: Tensor | None = None) -> Tensor:
        """See `base.PackedLMHead`."""
        return linear_argmax(as_tensor(x), self.weight, bias)


@dataclass(frozen=True)
class PlainGatedLinear:
    """See `base.PackedGatedLinear`."""

    takes: ClassVar[InputForm] = "unnormed"
    weight: PackedWeight
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.panels.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: ActivationName) -> Tensor:
        if isinstance(x, UnnormedRows):
            return unnormed_linear(x, self.weight, bias, gate=activation)
        return gated_linear(as_tensor(x), self.weight, self.width, bias, activation)


def pack(*parts: Tensor) -> PlainLinear:
    """See `base.Quantization.pack`."""
    return PlainLinear(pack_weight(*parts))


def pack_gated(gate: Tensor, up: Tensor) -> PlainGatedLinear:
    """See `base.Quantization.pack_gated`."""
    return PlainGatedLinear(pack_gate_up(gate, up), len(gate))


def allocate_experts(num_experts: int, *parts: Tensor) -> ExpertWeights:
    """See `base.Quantization.allocate_experts`."""
    out_features, (_, in_features), dtype = sum(len(part) for part in parts), parts[0].shape, parts[0].dtype
    if kernels(parts[0]) is _cpu:
        panels = streamed_empty((num_experts, *panel_shape(out_features, in_features, dtype)), dtype)
    else:
        panels = parts[0].new_empty(num_experts, out_features, in_features)
    return ExpertWeights(panels, None, in_features, out_features)


def pack_expert(experts: ExpertWeights, index: int, *parts: Tensor) -> None:
    """See `base.Quantization.pack_expert`."""
    pack_weight(*parts, panels=experts.panels[index])


pack_lm_head = pack
