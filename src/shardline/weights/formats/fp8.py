"""Weights in fp8 (e4m3) with one scale per output; the lm_head is int8_fast. GPUs quantize each row of activations too
(W8A8); the CPU multiplies activations as they are (W8A16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from shardline.kernels.tensors import as_tensor, features_error
from shardline.weights.base import GroupScales, PackedExperts, PackedGatedLinear, PackedLinear, Role, WeightFormat
from shardline.weights.formats import int8_fast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels
    from shardline.kernels.tensors import LinearInput

LARGEST = 448.0
"""The largest float8_e4m3fn number."""


class Fp8Kernels(Protocol):
    """What a back end offers for this format; see `WeightKernels`."""

    fp8_dtype: torch.dtype
    """torch.float8_e4m3fn"""
    quantizes_fp8_rows: bool
    """Whether `linear_fp8` quantizes each row of x with its own scale."""

    def activation_empty(self, dtype: torch.dtype, /, *sizes: int) -> Tensor: ...
    def fp8_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def pack_fp8(
        self, weight: Tensor, values: Tensor, scales: Tensor, first: int = ..., half: int | None = ..., /
    ) -> None: ...
    def linear_fp8(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: str | None = ...,
        /,
    ) -> None: ...


@dataclass(frozen=True)
class Fp8Linear(PackedLinear):
    """See `base.PackedLinear`.

    On GPUs, each row of x is quantized with its own scale. Tensor cores sum products over 128 neighbours along K at a
    time, and these sums are added in fp32 in the order of K. On the CPU, x is not quantized, and a sum is one chain in
    the order of K. The total is multiplied by the scales, the bias is added in fp32, and the result is rounded once.
    """

    kernels: Fp8Kernels
    values: Tensor
    """On GPUs [rows, in_features] float8_e4m3fn, on the CPU panels of such bytes"""
    scales: Tensor
    """float32, one per row"""
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.multiply(as_tensor(x), bias, out_dtype or x.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype, gate: str | None = None) -> Tensor:
        """The product, gated if `gate` names an activation."""
        if x.shape[1] != self.in_features:
            raise features_error(x.shape[1], self.in_features)
        out = self.kernels.activation_empty(out_dtype, x.shape[0], self.out_features)
        self.kernels.linear_fp8(x, self.values, self.scales, bias, out, gate)
        return out


@dataclass(frozen=True)
class Fp8GatedLinear(PackedGatedLinear):
    """See `base.PackedGatedLinear`."""

    both: Fp8Linear

    @property
    def nbytes(self) -> int:
        return self.both.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        return self.both.multiply(as_tensor(x), bias, x.dtype, activation)


class Format(WeightFormat):
    """See `base.WeightFormat`."""

    computes_in = "e4m3"
    gpu_cases = ("linear_int8", "linear_fp8")
    label = "fp8"

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        return rows * (columns + 4)

    def pack_linear(self, kernels: Kernels, *parts: Tensor) -> Fp8Linear:
        own_kernels = _own(kernels)
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        values, scales = own_kernels.fp8_empty(out_features, in_features)
        _pack_parts(own_kernels, values, scales, parts)
        return Fp8Linear(own_kernels, values, scales, in_features, out_features)

    def pack_gated(self, kernels: Kernels, gate: Tensor, up: Tensor) -> Fp8GatedLinear:
        own_kernels, (out_features, in_features) = _own(kernels), gate.shape
        values, scales = own_kernels.fp8_empty(out_features, in_features, gated=True)
        for half, part in enumerate((gate, up)):
            own_kernels.pack_fp8(part, values, scales, 0, half)
        return Fp8GatedLinear(Fp8Linear(own_kernels, values, scales, in_features, out_features))

    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> int8_fast.Int8LMHead:
        # No later layer averages out errors of the logits.
        return int8_fast.Format().pack_lm_head(kernels, weight)

    def allocate_experts(self, kernels: Kernels, num_experts: int, *parts: Tensor) -> PackedExperts:
        out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
        values, scales = _own(kernels).fp8_empty(out_features, in_features, num_matrices=num_experts)
        return PackedExperts(values, scales, in_features, out_features)

    def pack_expert(self, kernels: Kernels, experts: PackedExperts, index: int, *parts: Tensor) -> None:
        assert experts.scales is not None
        assert not isinstance(experts.scales, GroupScales)
        _pack_parts(_own(kernels), experts.panels[index], experts.scales[index], parts)

    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Sums in fp64, so its bits may differ from the kernels'."""
        own_kernels = _own(kernels)
        fp8 = own_kernels.fp8_dtype
        rows = dequantize_rows_fp8_reference(x, fp8) if own_kernels.quantizes_fp8_rows else x.double()
        product = rows @ dequantize_rows_fp8_reference(weight, fp8).T
        return (product if bias is None else product + bias.double()).to(out_dtype)


def dequantize_rows_fp8_reference(x: Tensor, fp8: torch.dtype) -> Tensor:
    """Rows x [M, K] as their values and scales in fp8 give them, float64."""
    values, scales = quantize_rows_fp8_reference(x, fp8)
    return values.double() * scales.double()[:, None]


def quantize_rows_fp8_reference(x: Tensor, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows x [M, K] as values [M, K] float8_e4m3fn and scales [M] float32: the largest |x| of a row becomes 448.

    A row that is not finite has the scale NaN; a row without a normal number has the scale zero.
    """
    magnitude = x.float().abs().amax(1, keepdim=True)
    has_size = magnitude.isfinite() & (magnitude >= 1e-36)
    inverse = magnitude.new_full(magnitude.shape, LARGEST) / magnitude.masked_fill(~has_size, 1.0)
    values = (x.float() * inverse).masked_fill(~has_size, 0.0).to(fp8)
    scales = (magnitude / LARGEST).masked_fill(~has_size, 0.0).masked_fill(~magnitude.isfinite(), float("nan"))
    return values, scales[:, 0]


def _own(kernels: Kernels) -> Fp8Kernels:
    return cast("Fp8Kernels", kernels)


def _pack_parts(kernels: Fp8Kernels, values: Tensor, scales: Tensor, parts: tuple[Tensor, ...]) -> None:
    first = 0
    for part in parts:
        kernels.pack_fp8(part, values, scales, first)
        first += len(part)
