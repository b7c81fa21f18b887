"""Dense feed-forward blocks, intermediate columns split over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from shardline.models.spec import Dense
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear
from shardline.runtime.ops.activation import activation, gated_activation


class DenseFeedForward:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, context: LayerContext, name: str, spec: Dense) -> None:
        self._spec = spec
        parts = ("gate", "up") if spec.gated else ("up",)
        self._up = ColumnLinear(context, [f"{name}.{part}" for part in parts], spec.bias)
        widths = [span.size for span in context.spans(f"{name}.up.weight")]
        self._down = ClosingLinear(context, f"{name}.down", widths, spec.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x))

    def local(self, x: Tensor) -> Tensor:
        """This rank's columns of the output, [T, local hidden]; exact numerics only."""
        return self._down.local(self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        combine = gated_activation if self._spec.gated else activation
        return combine(self._up(x), self._spec.activation)
