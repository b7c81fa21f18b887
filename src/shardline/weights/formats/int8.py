"""W8A8: weights in int8 with one scale per output; activations are quantized to int8 row by row as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.weights.base import Role
from shardline.weights.rows import quantize_rows, quantize_rows_reference
from shardline.weights.scaled import ScaledFormat, ScaledKernels, ScaledLinear

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.runtime.backends.base import Kernels
    from shardline.weights.rows import LinearInput


@dataclass(frozen=True)
class Int8LMHead(ScaledLinear):
    """See `base.PackedLinear`."""

    def argmax(self, x: LinearInput, bias: Tensor | None = None) -> Tensor:
        weight = self.weight
        rows = quantize_rows(weight.kernels, x)
        return weight.kernels.linear_int8_argmax(rows, weight.panels, weight.scales, bias, weight.out_features)


class Format(ScaledFormat):
    """See `base.WeightFormat`."""

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        return rows * (columns + 4)

    def choose_kernels(self, kernels: Kernels) -> ScaledKernels:
        return ScaledKernels(kernels.int8_empty, kernels.pack_int8, kernels.linear_int8)

    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> Int8LMHead:
        return Int8LMHead(self.pack_linear(kernels, weight).weight)

    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """The same bits."""
        rows, (values, scales) = quantize_rows_reference(x), int8_weight_reference(weight)
        sums = rows.values[:, : rows.in_features].long() @ values.long().T
        out = sums.float() * (rows.scales[:, None] * scales)
        return (out if bias is None else out + bias.float()).to(out_dtype)


def int8_weight_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What a weight [N, K] is rounded to: values [N, K] int8 and scales [N] float32."""
    magnitude = weight.float().abs().amax(1, keepdim=True)
    is_zero = magnitude < 1e-36
    inverse = (magnitude.new_full(magnitude.shape, 127) / magnitude).masked_fill(is_zero, 0.0)
    scales = (magnitude / 127).masked_fill(is_zero, 0.0)
    return (weight.float() * inverse).round().char(), scales[:, 0]
