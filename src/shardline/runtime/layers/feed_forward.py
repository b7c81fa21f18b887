"""Dense feed-forward blocks, intermediate columns split over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardline.models.spec import Dense
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear, GatedColumnLinear
from shardline.runtime.ops.activation import activation


class DenseFeedForward:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, context: LayerContext, name: str, spec: Dense) -> None:
        self._inner = _gated(context, name, spec) if spec.gated else _plain(context, name, spec)
        widths = [span.size for span in context.spans(f"{name}.up.weight")]
        self._down = ClosingLinear(context, f"{name}.down", widths, spec.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x))

    def local(self, x: Tensor) -> Tensor:
        """This rank's columns of the output, [T, local hidden]; exact numerics only."""
        return self._down.local(self._inner(x))


def _gated(context: LayerContext, name: str, spec: Dense) -> Callable[[Tensor], Tensor]:
    return GatedColumnLinear(context, f"{name}.gate", f"{name}.up", spec.bias, spec.activation)


def _plain(context: LayerContext, name: str, spec: Dense) -> Callable[[Tensor], Tensor]:
    up = ColumnLinear(context, [f"{name}.up"], spec.bias)
    return lambda x: activation(up(x), spec.activation)
