"""Dense feed-forward blocks, intermediate columns split over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from shardline.models.spec import Dense
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear, GatedColumnLinear
from shardline.runtime.ops.activation import ActivationName, activation
from shardline.runtime.ops.few_rows import AddedRows
from shardline.runtime.ops.linear_input import InputForm, LinearInput


class DenseFeedForward:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, context: LayerContext, name: str, spec: Dense) -> None:
        self._inner: GatedColumnLinear | _ActivatedLinear
        if spec.gated:
            self._inner = GatedColumnLinear(context, f"{name}.gate", f"{name}.up", spec.bias, spec.activation)
        else:
            self._inner = _ActivatedLinear(ColumnLinear(context, [f"{name}.up"], spec.bias), spec.activation)
        widths = [span.size for span in context.spans(f"{name}.up.weight")]
        self._down = ClosingLinear(context, f"{name}.down", widths, spec.bias)

    @property
    def takes(self) -> InputForm:
        """What x may be besides a tensor."""
        return self._inner.takes

    def __call__(self, x: LinearInput, residual: Tensor | None = None) -> Tensor | AddedRows:
        """`residual`: see ClosingLinear."""
        return self._down(self._inner(x), residual)

    def alone(self, x: LinearInput) -> Tensor:
        """The block's output only."""
        return self._down.alone(self._inner(x))

    def local(self, x: LinearInput) -> Tensor:
        """This rank's columns of the output, [T, local hidden]; exact numerics only."""
        return self._down.local(self._inner(x))


class _ActivatedLinear:
    """act(up(x)) for the columns that this rank owns: x [M, in] -> [M, local out]."""

    def __init__(self, up: ColumnLinear, activation: ActivationName) -> None:
        self._up, self._activation = up, activation
        self.takes = up.takes

    def __call__(self, x: LinearInput) -> Tensor:
        return activation(self._up(x), self._activation)
