"""W8A8: weights in int8 with one scale per output; activations are quantized to int8 row by row at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from shardline.weights.base import Role
from shardline.weights.rows import QuantizedRows, quantize_rows, quantize_rows_reference
from shardline.weights.scaled import ScaledFormat, ScaledKernels, ScaledLinear

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.runtime.backends.base import Kernels
    from shardline.weights.rows import LinearInput


class Int8Kernels(Protocol):
    """What a back end offers for this format; see `WeightKernels`."""

    def int8_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def pack_int8(
        self, weight: Tensor, panels: Tensor, scales: Tensor, first: int = ..., half: int | None = ..., /
    ) -> None: ...
    def linear_int8(
        self,
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        depth: int,
        panels: Tensor,
        column_scales: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: str | None = ...,
        /,
    ) -> None: ...
    def linear_int8_argmax(
        self,
        x: QuantizedRows,
        panels: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out_features: int,
        allowed: Tensor | None,
        /,
    ) -> Tensor:
        """See `PackedLinear.argmax`."""


@dataclass(frozen=True)
class Int8LMHead(ScaledLinear):
    """See `base.PackedLinear`."""

    def argmax(self, x: LinearInput, bias: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        weight = self.weight
        rows = quantize_rows(weight.kernels, x)
        own_kernels = cast("Int8Kernels", weight.kernels)
        return own_kernels.linear_int8_argmax(rows, weight.panels, weight.scales, bias, weight.out_features, allowed)


class Format(ScaledFormat):
    """See `base.WeightFormat`."""

    label = "int8"

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        return rows * (columns + 4)

    def choose_kernels(self, kernels: Kernels) -> ScaledKernels:
        own_kernels = cast("Int8Kernels", kernels)
        return ScaledKernels(own_kernels.int8_empty, own_kernels.pack_int8, own_kernels.linear_int8)

    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> Int8LMHead:
        return Int8LMHead(self.pack_linear(kernels, weight).weight)

    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Gives the same bits as the kernels."""
        rows, (values, scales) = quantize_rows_reference(x), int8_weight_reference(weight)
        sums = rows.values[:, : rows.in_features].long() @ values.long().T
        out = sums.float() * (rows.scales[:, None] * scales)
        return (out if bias is None else out + bias.float()).to(out_dtype)


def int8_weight_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A quantized weight [N, K]: values [N, K] int8 and scales [N] float32."""
    magnitude = weight.float().abs().amax(1, keepdim=True)
    is_zero = magnitude < 1e-36
    inverse = (magnitude.new_full(magnitude.shape, 127) / magnitude).masked_fill(is_zero, 0.0)
    scales = (magnitude / 127).masked_fill(is_zero, 0.0)
    return (weight.float() * inverse).round().char(), scales[:, 0]
