"""The forms in which a product reads its rows of activations: unquantized, or quantized to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.runtime.backends.base import Kernels

GROUP_SIZE = 32
"""Neighbours along K that share a scale in int4; quantized rows are padded to whole groups."""


class QuantizedRows(NamedTuple):
    """Rows x [M, K] as `scales * values`, with one scale per row."""

    values: Tensor
    """[M, K padded with zeros to whole groups] int8, within [-127, 127]."""
    scales: Tensor
    """[M] float32; NaN for a row that is not finite."""
    sums: Tensor
    """[M, 1 + number of groups] int32: the sum of the row's values, then of each group's. Empty, [M, 0], if the
    products read signed weights and need no sums."""
    in_features: int
    """K"""
    dtype: torch.dtype
    """The dtype of x."""


LinearInput: TypeAlias = "Tensor | QuantizedRows"
"""Rows of activations, as a product reads them."""

InputForm = Literal["tensor", "quantized"]
"""The form that a product reads best: unquantized rows, or `QuantizedRows`."""


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


def as_tensor(x: LinearInput) -> Tensor:
    """x, for a product that reads only tensors."""
    assert not isinstance(x, QuantizedRows)
    return x


def check_features(features: int, expected: int) -> None:
    """Raise ValueError if rows have another number of features than a weight."""
    if features != expected:
        raise ValueError(f"x has {features} features, the weight takes {expected}")
