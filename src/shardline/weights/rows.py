"""The forms in which a product reads its rows of activations: unquantized, or quantized to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardline.kernels.tensors import GROUP_SIZE, LinearInput, QuantizedRows

if TYPE_CHECKING:
    from torch import Tensor

    from shardline.kernels.contract import Kernels


def quantize_rows(kernels: Kernels, x: LinearInput) -> QuantizedRows:
    """x [M, K], float32 or bfloat16, quantized unless it already is; rows may be strided.

    A row's bytes depend only on that row.
    """
    if isinstance(x, QuantizedRows):
        return x
    rows = kernels.quantized_empty(x.shape[0], x.shape[1], x.dtype)
    kernels.quantize_rows(x, rows.values, rows.scales, rows.sums)
    return rows


def quantize_rows_reference(x: Tensor) -> QuantizedRows:
    """The oracle of `quantize_rows` in plain torch: the same bits."""
    magnitude = x.float().abs().amax(1, keepdim=True)
    is_zero, is_finite = magnitude < 1e-36, magnitude.isfinite()
    # new_full, because torch computes 127 / x as 127 * (1 / x), which rounds twice.
    inverse = (magnitude.new_full(magnitude.shape, 127) / magnitude).masked_fill(is_zero | ~is_finite, 0.0)
    groups = -(-x.shape[1] // GROUP_SIZE)
    values = x.new_zeros(len(x), groups * GROUP_SIZE).char()
    values[:, : x.shape[1]] = (x.float() * inverse).nan_to_num().round().char()
    group_sums = values.view(len(x), groups, GROUP_SIZE).int().sum(2).int()
    sums = group_sums.new_empty(len(x), 1 + groups)
    sums[:, 0], sums[:, 1:] = group_sums.sum(1), group_sums
    scales = (magnitude / 127).masked_fill(is_zero, 0.0).masked_fill(~is_finite, float("nan"))
    return QuantizedRows(values, scales[:, 0], sums, x.shape[1], x.dtype)
