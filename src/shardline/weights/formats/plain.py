"""Weights in the activations' dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.kernels.tensors import QuantizedRows, as_tensor, features_error
from shardline.weights.base import PackedExperts, PackedGatedLinear, PackedLinear, Role, WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels
    from shardline.kernels.tensors import LinearInput


@dataclass(frozen=True)
class PlainLinear(PackedLinear):
    """See `base.PackedLinear`. Sums run over all of K in order, in fp32. The bias is added in fp32, and the result is
    rounded once."""

    kernels: Kernels
    panels: Tensor
    """The weight in the layout of `Kernels.weight_empty`."""
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight."""
        return self.panels.dtype

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        assert not isinstance(x, QuantizedRows)
        if x.shape[1] != self.in_features:
            raise features_error(x.shape[1], self.in_features)
        out = self.kernels.activation_empty(out_dtype or x.dtype, x.shape[0], self.out_features)
        self.kernels.linear(x, self.panels, bias, out)
        return out

    def argmax(self, x: LinearInput, bias: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        return self.kernels.linear_argmax(as_tensor(x), self.panels, bias, self.out_features, allowed)

    def row_reader(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        return self.unpack_rows if dtype == self.dtype else None

    def unpack_rows(self, indices: Tensor) -> Tensor:
        """Unpacked rows of the weight, [len(indices), in_features]."""
        out = self.panels.new_empty(len(indices), self.in_features)
        self.kernels.unpack_rows(self.panels, indices.contiguous(), out)
        return out


@dataclass(frozen=True)
class PlainGatedLinear(PackedGatedLinear):
    """See `base.PackedGatedLinear`."""

    kernels: Kernels
    panels: Tensor
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        assert not isinstance(x, QuantizedRows)
        if x.shape[1] != self.in_features:
            raise features_error(x.shape[1], self.in_features)
        out = self.kernels.activation_empty(x.dtype, x.shape[0], self.out_features)
        self.kernels.linear(x, self.panels, bias, out, activation)
        return out


class Format(WeightFormat):
    """See `base.WeightFormat`."""

    label = ""

    def is_dense(self, role: Role) -> bool:
        return True

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        return rows * columns * dtype_bytes

    def pack_linear(self, kernels: Kernels, *parts: Tensor) -> PlainLinear:
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        panels = kernels.weight_empty(parts[0].dtype, out_features, in_features)
        _pack_parts(kernels, panels, parts)
        return PlainLinear(kernels, panels, in_features, out_features)

    def pack_gated(self, kernels: Kernels, gate: Tensor, up: Tensor) -> PlainGatedLinear:
        out_features, in_features = gate.shape
        panels = kernels.weight_empty(gate.dtype, out_features, in_features, gated=True)
        for half, part in enumerate((gate, up)):
            kernels.pack_weight(part, panels, 0, half)
        return PlainGatedLinear(kernels, panels, in_features, out_features)

    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> PlainLinear:
        return self.pack_linear(kernels, weight)

    def allocate_experts(self, kernels: Kernels, num_experts: int, *parts: Tensor) -> PackedExperts:
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        panels = kernels.weight_empty(parts[0].dtype, out_features, in_features, num_matrices=num_experts)
        return PackedExperts(panels, None, in_features, out_features)

    def pack_expert(self, kernels: Kernels, experts: PackedExperts, index: int, *parts: Tensor) -> None:
        _pack_parts(kernels, experts.panels[index], parts)

    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        product = x.double() @ weight.double().T
        return (product if bias is None else product + bias.double()).to(out_dtype)


def _pack_parts(kernels: Kernels, panels: Tensor, parts: tuple[Tensor, ...]) -> None:
    """Pack each part directly into its columns, so that the parts need not be stacked first."""
    first = 0
    for part in parts:
        kernels.pack_weight(part, panels, first)
        first += len(part)
