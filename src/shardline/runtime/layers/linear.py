"""Linear layers that know their axis.

Exact numerics split the output dim: each output element is summed by one rank over full K. Fast numerics split K of
the closing projections (o, down) as in Megatron-LM (Shoeybi et al., 2019) and add partial sums across ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.runtime.layers.context import LayerContext
from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.ops.few_rows import AddedRows, add_linear, are_few_on_gpu
from shardline.runtime.ops.linear import PackedWeight
from shardline.runtime.ops.linear_input import InputForm, LinearInput
from shardline.runtime.quantization.none import PlainLinear


class ColumnLinear:
    """Rows of one or several weights [out, in] that this rank owns, stacked: x [M, in] -> [M, local out].

    The input is whole on every rank, the output local.
    """

    def __init__(self, context: LayerContext, names: Sequence[str], bias: bool) -> None:
        weights = [context.read_linear(f"{name}.weight") for name in names]
        self.widths = tuple(len(weight) for weight in weights)
        """Local output columns of each name, in order."""
        self._linear = context.pack(*weights)
        self._bias = torch.cat([context.load(f"{name}.bias") for name in names]) if bias else None

    @property
    def takes(self) -> InputForm:
        """What x may be besides a tensor."""
        return self._linear.takes

    @property
    def plain(self) -> tuple[PackedWeight, Tensor | None] | None:
        """Weight and bias, if the weight is in the activations' dtype."""
        return (self._linear.weight, self._bias) if isinstance(self._linear, PlainLinear) else None

    def __call__(self, x: LinearInput, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._linear(x, self._bias, out_dtype=out_dtype)


class GatedColumnLinear:
    """act(gate(x)) * up(x) for the columns that this rank owns: x [M, in] -> [M, local out]."""

    def __init__(self, context: LayerContext, gate: str, up: str, bias: bool, activation: ActivationName) -> None:
        self._activation = activation
        self._linear = context.pack_gated(context.read_linear(f"{gate}.weight"), context.read_linear(f"{up}.weight"))
        self._bias = torch.cat([context.load(f"{name}.bias") for name in (gate, up)]) if bias else None

    @property
    def takes(self) -> InputForm:
        """What x may be besides a tensor."""
        return self._linear.takes

    def __call__(self, x: LinearInput) -> Tensor:
        return self._linear(x, self._bias, self._activation)


class ClosingLinear:
    """The projection that ends a block: local input columns [M, local in] -> [M, out], whole on every rank."""

    def __init__(self, context: LayerContext, name: str, input_widths: Sequence[int], bias: bool) -> None:
        self._group = context.group
        self._exact = context.numerics == "exact" or context.group.size == 1
        self._input_widths = tuple(input_widths)
        self._linear = context.pack(context.read_linear(f"{name}.weight"))
        self._bias = context.load(f"{name}.bias") if bias else None
        self._output_widths = tuple(span.size for span in context.spans(f"{name}.weight")) if self._exact else ()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor | AddedRows:
        """`residual`: rows [M, out] that are added next, and are so here, where one launch can do both."""
        linear = self._linear
        if residual is None or self._group.size > 1 or not isinstance(linear, PlainLinear) or not are_few_on_gpu(x):
            return self.alone(x)
        return add_linear(x, linear.weight, self._bias, residual)

    def alone(self, x: Tensor) -> Tensor:
        """The product only."""
        if self._exact:
            return self._group.all_gather_columns(self.local(x), self._output_widths)
        total = self._group.all_reduce_sum(self._linear(x, out_dtype=torch.float32))
        if self._bias is not None:
            total += self._bias.float()
        return total.to(x.dtype)

    def local(self, x: Tensor) -> Tensor:
        """This rank's columns of the output; exact numerics only."""
        assert self._exact, "fast numerics split the input"
        gather = (
            self._group.all_gather_quantized if self._linear.takes == "quantized" else self._group.all_gather_columns
        )
        return self._linear(gather(x, self._input_widths), self._bias)
