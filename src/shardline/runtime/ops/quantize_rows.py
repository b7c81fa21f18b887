"""Rows of activations as signed bytes, for the products with quantized weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels

GROUP_SIZE = 32
"""Neighbours along K that share a scale in int4."""


class QuantizedRows(NamedTuple):
    """Rows x [M, K] as `scales * values`, each row with a scale of its own."""

    values: Tensor
    """[M, K padded with zeros to whole groups] int8, within [-127, 127]."""
    scales: Tensor
    """[M] float32; NaN for a row that is not finite."""
    sums: Tensor
    """[M, 1 + number of groups] int32: the sum of the row's values, then of each group's. On a GPU [M, 0]: the products
    there take signed weights, and need none."""
    in_features: int
    """K"""
    dtype: torch.dtype
    """Of x."""


def quantized_empty(x: Tensor, in_features: int | None = None) -> QuantizedRows:
    """Room for the rows of x [M, K], where it lies, or for as many of `in_features`."""
    rows, in_features = x.shape[0], in_features or x.shape[1]
    num_groups = -(-in_features // GROUP_SIZE)
    on = kernels(x)
    values = on.activation_empty(torch.int8, rows, num_groups * GROUP_SIZE)
    scales = on.activation_empty(torch.float32, rows)
    sums = on.activation_empty(torch.int32, rows, 1 + num_groups if on is _cpu else 0)
    return QuantizedRows(values, scales, sums, in_features, x.dtype)


def quantize_rows(x: Tensor) -> QuantizedRows:
    """x: [M, K], float32 or bfloat16; rows may be strided. A row's bytes depend on the row only."""
    rows = quantized_empty(x)
    kernels(x).quantize_rows(x, rows.values, rows.scales, rows.sums)
    return rows


def quantize_rows_reference(x: Tensor) -> QuantizedRows:
    """`quantize_rows` in plain torch: the same bits."""
    # torch turns 127 / x into 127 * (1 / x), which rounds twice; hence full_like.
    magnitude = x.float().abs().amax(1, keepdim=True)
    zero = magnitude < 1e-36
    scales = torch.where(zero, 0.0, magnitude / 127)
    inverse = torch.where(zero | ~magnitude.isfinite(), 0.0, torch.full_like(magnitude, 127) / magnitude)
    values = torch.nan_to_num(x.float() * inverse).round().to(torch.int8)
    values = torch.nn.functional.pad(values, (0, -x.shape[1] % GROUP_SIZE))
    group_sums = values.view(len(x), -1, GROUP_SIZE).sum(2, dtype=torch.int32)
    sums = torch.cat([group_sums.sum(1, keepdim=True, dtype=torch.int32), group_sums], dim=1)
    scales = torch.where(magnitude.isfinite(), scales, torch.nan)
    return QuantizedRows(values, scales[:, 0], sums, x.shape[1], x.dtype)
