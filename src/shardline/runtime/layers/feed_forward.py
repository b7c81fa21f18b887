"""Dense feed-forward blocks; intermediate columns are split over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput
from shardline.models.feed_forward import Dense
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear, GatedColumnLinear
from shardline.runtime.ops.activation import ActivationName, activation
from shardline.runtime.step import Rows


class DenseFeedForward:
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, loader: LayerLoader, name: str, spec: Dense) -> None:
        self.inner: GatedColumnLinear | ActivatedLinear
        if spec.gated:
            self.inner = GatedColumnLinear(loader, f"{name}.gate", f"{name}.up", spec.bias, spec.activation)
        else:
            self.inner = ActivatedLinear(loader, f"{name}.up", spec.bias, spec.activation)
        widths = [span.size for span in loader.stage.spans(f"{name}.up.weight")]
        self.down = ClosingLinear(loader, f"{name}.down", widths, spec.bias)

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        return self.inner.input_form

    def __call__(self, x: LinearInput, rows: Rows, hidden: Tensor | None = None) -> Tensor:
        """`hidden`: the residual stream, which this block does not read."""
        return self.down(self.inner(x, rows), rows)

    def compute_columns(self, x: LinearInput, rows: Rows) -> Tensor:
        """This rank's columns of the output, [T, local hidden]; exact numerics only."""
        return self.down.compute_columns(self.inner(x, rows), rows)


class NoFeedForward:
    """Nothing follows the attention in the layer."""

    input_form: InputForm = "tensor"


class ActivatedLinear:
    """act(up(x)) for the columns that this rank owns: x [M, in] -> [M, local out]."""

    def __init__(self, loader: LayerLoader, name: str, bias: bool, activation: ActivationName) -> None:
        self._kernels = loader.stage.kernels
        self._activation = activation
        self.up = ColumnLinear(loader, [name], bias)

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        return self.up.input_form

    def __call__(self, x: LinearInput, rows: Rows) -> Tensor:
        return self.activate(self.up(x, rows))

    def activate(self, x: Tensor) -> Tensor:
        """act(x)."""
        return activation(self._kernels, x, self._activation)
