"""Matrix product of fp8 rows with an fp8 weight that has one scale per output column (W8A8, e4m3); GPUs only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.runtime.ops.activation import ActivationName, gated_activation_reference

LARGEST = 448.0
"""Of float8_e4m3fn."""


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [out_features, in_features] as float8_e4m3fn, row by row."""

    values: Tensor
    """[out_features, in_features] float8_e4m3fn"""
    scales: Tensor
    """[out_features] float32"""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.scales.nbytes


def pack_fp8(weight: Tensor) -> Fp8Weight:
    """weight: [out_features, in_features], float32 or bfloat16. A row's bytes follow from that row alone."""
    return Fp8Weight(*quantize_rows_fp8_reference(weight))


def linear_fp8(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    gate: ActivationName | None = None,
) -> Tensor:
    """x [M, K] in fp8, each row with a scale of its own, times the weight's transpose, plus bias [N]: [M, N].

    Products are summed by the tensor cores over 128 neighbours of K at a time, and these sums in fp32 in the order of
    K; then multiplied by both scales; the bias is added in fp32; one rounding to `out_dtype` (default: x's) ends it.
    With `gate` the weight is two, one under the other, and the result as of `gated_activation`: [M, N / 2].
    """
    from shardline.runtime.ops import triton as on_gpu

    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    on_gpu.quantize_rows_fp8(x, values, scales)
    width = weight.values.shape[0] // (1 if gate is None else 2)
    out = torch.empty(x.shape[0], width, dtype=out_dtype or x.dtype, device=x.device)
    on_gpu.linear_fp8(values, scales, weight.values, weight.scales, bias, out, gate)
    return out


def quantize_rows_fp8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [M, K] as values [M, K] float8_e4m3fn and scales [M] float32: the largest of a row becomes 448.

    A row that is not finite has the scale NaN; one without a normal number, zero.
    """
    magnitude = x.float().abs().amax(1, keepdim=True)
    has_size = magnitude.isfinite() & (magnitude >= 1e-36)
    inverse = torch.full_like(magnitude, LARGEST) / torch.where(has_size, magnitude, 1.0)
    values = torch.where(has_size, x.float() * inverse, 0.0).to(torch.float8_e4m3fn)
    scales = torch.where(has_size, magnitude / LARGEST, 0.0)
    return values, torch.where(magnitude.isfinite(), scales, torch.nan)[:, 0]


def linear_fp8_reference(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    gate: ActivationName | None = None,
) -> Tensor:
    """`linear_fp8` with sums in fp64."""
    values, scales = quantize_rows_fp8_reference(x)
    product = (values.double() @ weight.values.double().T) * (scales.double()[:, None] * weight.scales.double())
    if bias is not None:
        product = product + bias.double()
    rounded = product.to(out_dtype or x.dtype)
    return rounded if gate is None else gated_activation_reference(rounded, gate)
