"""RMSNorm and LayerNorm: one row, one owner, so every rank computes whole rows."""

from __future__ import annotations

from torch import Tensor

from shardline.models.spec import Norm
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.ops.few_rows import AddedRows
from shardline.runtime.ops.linear_input import InputForm, LinearInput, UnnormedRows
from shardline.runtime.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class NormLayer:
    """A norm over the last dim."""

    def __init__(self, context: LayerContext, name: str, norm: Norm) -> None:
        self._norm = norm
        self.weight = context.load(f"{name}.weight")
        self._bias = context.load(f"{name}.bias") if norm.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[M, H] or heads [T, N, H] -> the same, contiguous."""
        if self._norm.kind == "rms":
            return rms_norm(x, self.weight, self._norm.eps, weight_offset=self._norm.weight_offset)
        return layer_norm(x, self.weight, self._bias, self._norm.eps)


class InputNorm:
    """The norm before linears, in the form in which they take it; fused with the residual addition before it."""

    def __init__(self, context: LayerContext, name: str, norm: Norm, *, takes: InputForm) -> None:
        """`takes`: what the linears take; nobody else reads the norm."""
        self._norm = norm
        self._weight = context.load(f"{name}.weight")
        self._bias = context.load(f"{name}.bias") if norm.bias else None
        self._takes = takes

    def __call__(self, x: Tensor, residual: Tensor | AddedRows | None = None) -> tuple[LinearInput, Tensor]:
        """(norm(s), s) for s = x + residual, rounded to the activations' dtype first, or x alone, or what was added
        already; all [M, H]."""
        norm, weight, quantized = self._norm, self._weight, self._takes == "quantized"
        if isinstance(residual, AddedRows):
            x, square_sums = residual
            if norm.kind == "rms" and self._takes == "unnormed":
                return UnnormedRows(x, square_sums, weight, norm.eps, norm.weight_offset), x
            residual = None
        if norm.kind == "rms":
            offset = norm.weight_offset
            return add_rms_norm(x, residual, weight, norm.eps, weight_offset=offset, quantized=quantized)
        return add_layer_norm(x, residual, weight, self._bias, norm.eps, quantized=quantized)
