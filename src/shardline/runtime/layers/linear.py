"""Tensor-parallel linear layers.

Exact numerics split the output dim: one rank sums each output element over full K. Fast numerics split K of the closing
projections (o, down), as in Megatron-LM (Shoeybi et al., 2019), and add partial sums across ranks.

A linear also gets the table of its input's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.low_rank import LinearAdapters, form_with, make_adapters
from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.step import Rows


class ColumnLinear:
    """The rows of one or several weights [out, in] that this rank owns, stacked: x [M, in] -> [M, local out].

    The input is whole on every rank; the output is local.
    """

    def __init__(self, loader: LayerLoader, names: Sequence[str], bias: bool) -> None:
        spans = [loader.stage.spans(f"{name}.weight")[loader.stage.group.rank] for name in names]
        self.widths = tuple(span.size for span in spans)
        """Local output columns of each name, in order."""
        self.packed = loader.pack_linear(*names)
        self.bias = loader.load_bias(*names) if bias else None
        self._adapters = make_adapters(loader, *names)

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        return form_with(self._adapters, self.packed.input_form)

    def __call__(self, x: LinearInput, rows: Rows) -> Tensor:
        return _of_rows(self.packed(x, _bias(self._adapters, self.bias, x, rows)), rows)


class GatedColumnLinear:
    """act(gate(x)) * up(x) for the columns that this rank owns: x [M, in] -> [M, local out]."""

    def __init__(self, loader: LayerLoader, gate: str, up: str, bias: bool, activation: ActivationName) -> None:
        self.activation = activation
        self.packed = loader.pack_gated(gate, up)
        self.bias = loader.load_bias(gate, up) if bias else None
        self._adapters = make_adapters(loader, gate, up)

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        return form_with(self._adapters, self.packed.input_form)

    def __call__(self, x: LinearInput, rows: Rows) -> Tensor:
        return _of_rows(self.packed(x, _bias(self._adapters, self.bias, x, rows), self.activation), rows)


class WholeLinear:
    """A weight [out, in] that every rank holds whole: x [M, in] -> [M, out]."""

    def __init__(self, loader: LayerLoader, name: str) -> None:
        self._packed = loader.pack_linear(name)
        self._adapters = make_adapters(loader, name)

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        return _of_rows(self._packed(x, _bias(self._adapters, None, x, rows)), rows)


class ClosingLinear:
    """The projection that ends a block: local input columns [M, local in] -> [M, out], whole on every rank."""

    def __init__(self, loader: LayerLoader, name: str, input_widths: Sequence[int], bias: bool) -> None:
        stage = loader.stage
        self.group = stage.group
        self._kernels = stage.kernels
        self._splits_outputs = stage.splits_outputs
        self._input_widths = tuple(input_widths)
        self.packed = loader.pack_linear(name)
        self.bias = loader.load(f"{name}.bias") if bias else None
        self._adapters = make_adapters(loader, name)
        spans = stage.spans(f"{name}.weight") if self._splits_outputs else ()
        self._output_widths = tuple(span.size for span in spans)

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        if self._splits_outputs:
            return self.group.all_gather_columns(self.compute_columns(x, rows), self._output_widths)
        total = self.group.all_reduce_sum(_of_rows(self.packed(x, out_dtype=torch.float32), rows))
        if self.bias is not None:
            total += self.bias.float()
        return total.to(x.dtype)

    def compute_columns(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's columns of the output; exact numerics only."""
        assert self._splits_outputs, "fast numerics split the input"
        whole: LinearInput
        if self.packed.input_form == "quantized" and (self._adapters is None or rows.adapters is None):
            whole = self.group.all_gather_quantized(self._kernels, x, self._input_widths)
        else:
            whole = self.group.all_gather_columns(x, self._input_widths)
        return _of_rows(self.packed(whole, _bias(self._adapters, self.bias, whole, rows)), rows)


def _bias(adapters: LinearAdapters | None, bias: Tensor | None, x: LinearInput, rows: Rows) -> Tensor | None:
    """What the product of x adds to its sums before it rounds them: the bias, and what the adapters of rows add."""
    return bias if adapters is None else adapters.bias(bias, x, rows)


def _of_rows(out: Tensor, rows: Rows) -> Tensor:
    """The output [M, N] of a linear, for the M rows of the table."""
    assert len(out) == len(rows), "a linear's input has other rows than the table"
    return out
