"""Code shared by int8, int8_fast and int4_fast: weights of few bits with scales, and products of quantized rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shardline.kernels.tensors import InputForm, QuantizedRows, as_tensor, features_error
from shardline.weights.base import (
    GroupScales,
    PackedExperts,
    PackedGatedLinear,
    PackedLinear,
    RotatedScales,
    WeightFormat,
)
from shardline.weights.rotation import quantize_rotated
from shardline.weights.rows import quantize_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels
    from shardline.kernels.tensors import LinearInput


class ScaledKernels(NamedTuple):
    """A back end's kernels for one such format; see `Int8Kernels` and `Int4Kernels` for their arguments."""

    empty: Callable[..., tuple[Tensor, Tensor]]
    pack: Callable[..., None]
    linear: Callable[..., None]


@dataclass(frozen=True)
class ScaledWeight:
    """Panels and column scales, and the product that reads them."""

    kernels: Kernels
    linear: Callable[..., None]
    panels: Tensor
    scales: Tensor
    in_features: int
    out_features: int
    rotated: bool = False
    """Whether the parts of its rows are mixed, so that those of x must be; see `weights.rotation`."""

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes + self.scales.nbytes

    @property
    def input_form(self) -> InputForm:
        """See `base.PackedLinear`."""
        return "tensor" if self.rotated else "quantized"

    def quantize(self, x: LinearInput) -> QuantizedRows:
        """x as the product reads it."""
        return quantize_rotated(self.kernels, as_tensor(x)) if self.rotated else quantize_rows(self.kernels, x)

    def multiply(self, x: LinearInput, bias: Tensor | None, out_dtype: torch.dtype, gate: str | None = None) -> Tensor:
        """x [M, in_features] times the transpose, plus bias: [M, out_features]; gated if `gate` names an activation.

        Products are summed exactly, in int32. The sum is multiplied by the product of the row's and the column's scale
        in fp32, then the bias is added, and the result is rounded once. The bits are the same on every ISA and on GPUs.
        """
        rows = self.quantize(x)
        if rows.in_features != self.in_features:
            raise features_error(rows.in_features, self.in_features)
        out = self.kernels.activation_empty(out_dtype, rows.values.shape[0], self.out_features)
        self.linear(*rows[:4], self.panels, self.scales, bias, out, gate)
        return out


@dataclass(frozen=True)
class ScaledLinear(PackedLinear):
    """See `base.PackedLinear`."""

    weight: ScaledWeight

    @property
    def input_form(self) -> InputForm:  # type: ignore[override]
        return self.weight.input_form

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.out_features

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.weight.multiply(x, bias, out_dtype or x.dtype)


@dataclass(frozen=True)
class ScaledGatedLinear(PackedGatedLinear):
    """See `base.PackedGatedLinear`."""

    weight: ScaledWeight

    @property
    def input_form(self) -> InputForm:  # type: ignore[override]
        return self.weight.input_form

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        return self.weight.multiply(x, bias, x.dtype, activation)


class ScaledFormat(WeightFormat):
    """Base class of these formats; a format names its own kernels."""

    computes_in: ClassVar[str] = "bytes"
    rotates: ClassVar[bool] = False
    """Whether the parts of rows are mixed; then `pack` mixes those of weights."""

    @abstractmethod
    def choose_kernels(self, kernels: Kernels) -> ScaledKernels:
        """The back end's kernels for this format."""

    def pack_linear(self, kernels: Kernels, *parts: Tensor) -> ScaledLinear:
        own_kernels = self.choose_kernels(kernels)
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        panels, scales = own_kernels.empty(out_features, in_features)
        self._pack_parts(own_kernels, panels, scales, parts)
        return ScaledLinear(self._weight(kernels, panels, scales, in_features, out_features))

    def pack_gated(self, kernels: Kernels, gate: Tensor, up: Tensor) -> ScaledGatedLinear:
        own_kernels = self.choose_kernels(kernels)
        out_features, in_features = gate.shape
        panels, scales = own_kernels.empty(out_features, in_features, gated=True)
        for half, part in enumerate((gate, up)):
            own_kernels.pack(part, panels, scales, 0, half)
        return ScaledGatedLinear(self._weight(kernels, panels, scales, in_features, out_features))

    def allocate_experts(self, kernels: Kernels, num_experts: int, *parts: Tensor) -> PackedExperts:
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        panels, scales = self.choose_kernels(kernels).empty(out_features, in_features, num_matrices=num_experts)
        return PackedExperts(panels, RotatedScales(scales) if self.rotates else scales, in_features, out_features)

    def pack_expert(self, kernels: Kernels, experts: PackedExperts, index: int, *parts: Tensor) -> None:
        assert experts.scales is not None
        assert not isinstance(experts.scales, GroupScales)
        scales = experts.scales.scales if isinstance(experts.scales, RotatedScales) else experts.scales
        self._pack_parts(self.choose_kernels(kernels), experts.panels[index], scales[index], parts)

    def _weight(
        self, kernels: Kernels, panels: Tensor, scales: Tensor, in_features: int, out_features: int
    ) -> ScaledWeight:
        linear = self.choose_kernels(kernels).linear
        return ScaledWeight(kernels, linear, panels, scales, in_features, out_features, self.rotates)

    @staticmethod
    def _pack_parts(own_kernels: ScaledKernels, panels: Tensor, scales: Tensor, parts: tuple[Tensor, ...]) -> None:
        """Pack each part directly into its columns, so that the parts need not be stacked first."""
        first = 0
        for part in parts:
            own_kernels.pack(part, panels, scales, first)
            first += len(part)
