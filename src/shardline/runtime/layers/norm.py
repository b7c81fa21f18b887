"""RMSNorm and LayerNorm: one row, one owner, so every rank computes whole rows."""

from __future__ import annotations

from torch import Tensor

from shardline.models.spec import Norm
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class NormLayer:
    """A norm over the last dim, alone or fused with the residual addition before it."""

    def __init__(self, context: LayerContext, name: str, norm: Norm) -> None:
        self._norm = norm
        self._weight = context.load(f"{name}.weight")
        self._bias = context.load(f"{name}.bias") if norm.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[M, H] or heads [T, N, H] -> the same, contiguous."""
        if self._norm.kind == "rms":
            return rms_norm(x, self._weight, self._norm.eps, weight_offset=self._norm.weight_offset)
        return layer_norm(x, self._weight, self._bias, self._norm.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), the sum rounded to the activations' dtype first."""
        if self._norm.kind == "rms":
            return add_rms_norm(x, residual, self._weight, self._norm.eps, weight_offset=self._norm.weight_offset)
        return add_layer_norm(x, residual, self._weight, self._bias, self._norm.eps)
