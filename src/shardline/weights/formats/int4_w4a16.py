"""W4A16: weights in 4 bits with a scale and a minimum for each 32 neighbours along K, the lm_head in 8 bits. Products
read activations as they are; many rows take longer than with `int4`. On CPUs.

A minimum costs a byte for each group, and lets the 16 values of a group lie where its weights are. Scales and minimums
have two levels, as in GGUF's Q4_K: a byte for each group, times a number in float16 that up to 8 groups share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from shardline.weights.base import PackedLinear, Role
from shardline.weights.formats import int8_w8a16
from shardline.weights.formats.int8_w8a16 import group_of, in_groups, num_groups, row_slices
from shardline.weights.grouped import GroupedWeight, TwoLevels

if TYPE_CHECKING:
    from torch import Tensor

    from shardline.kernels.contract import Kernels

_LARGEST_CODE, _LARGEST_INNER = 15, 127
_OUTER_GROUPS = 8


class Format(int8_w8a16.Format):
    """See `base.WeightFormat`."""

    alternatives: ClassVar[str] = "int4"

    @property
    def label(self) -> str:
        return "int4_w4a16"

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        if role == "lm_head":
            return super().num_bytes(rows, columns, dtype_bytes, role)
        groups = num_groups(columns)
        return rows * (-(-columns // 2) + 2 * (groups + 2 * (groups // math.gcd(groups, _OUTER_GROUPS))))

    def pack_lm_head(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> PackedLinear:
        # No later layer averages out errors of the logits.
        return int8_w8a16.Format().pack_lm_head(kernels, weight)

    def quantize(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> GroupedWeight:
        assert not isinstance(weight, GroupedWeight), "the format reads dense weights"
        codes, (num_rows, groups) = weight.new_empty(weight.shape).byte(), (len(weight), num_groups(weight.shape[1]))
        scales, mins = (
            TwoLevels(
                codes.new_empty(num_rows, groups).char(),
                codes.new_empty(num_rows, groups // math.gcd(groups, _OUTER_GROUPS)).half(),
            )
            for _ in range(2)
        )
        for rows in row_slices(weight):
            values = in_groups(weight[rows])
            scale, low = _fit(values)
            _set_levels(scales.select_rows(rows), scale, least=1)
            _set_levels(mins.select_rows(rows), -low, least=-_LARGEST_INNER)
            scale, low = scales.select_rows(rows).multiply(), -mins.select_rows(rows).multiply()
            codes[rows] = _nearest(values, scale, low).flatten(1)[:, : weight.shape[1]].byte()
        return GroupedWeight(
            codes,
            scales.multiply(),
            group_of(codes),
            mins=mins.multiply(),
            label=self.label,
            scale_levels=scales,
            min_levels=mins,
        )


def _nearest(values: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The codes, as floats, of groups [N, G, 32] for scales and smallest values [N, G]."""
    return ((values - low[..., None]) / scale[..., None]).nan_to_num().round().clamp(0, _LARGEST_CODE)


def _fit(values: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, smallest values) [N, G] of groups: of the line from the smallest to the largest weight, and of the line
    that fits the codes of this one best, the one with the smaller squared error."""
    low, high = values.amin(2), values.amax(2)
    scale = (high - low) / _LARGEST_CODE
    codes = _nearest(values, scale, low)
    code_mean, mean = codes.mean(2, keepdim=True), values.mean(2, keepdim=True)
    off = codes - code_mean
    fitted = ((off * (values - mean)).sum(2) / off.square().sum(2)).nan_to_num()
    fitted_low = mean[..., 0] - fitted * code_mean[..., 0]
    is_better = _error(values, fitted, fitted_low) < _error(values, scale, low)
    return fitted.where(is_better, scale), fitted_low.where(is_better, low)


def _error(values: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The squared error [N, G] of groups."""
    found = _nearest(values, scale, low) * scale[..., None] + low[..., None]
    return (found - values).square().sum(2)


def _set_levels(levels: TwoLevels, numbers: Tensor, least: int) -> None:
    """Write numbers [N, G] as products of two levels. Inner numbers are at least `least`."""
    runs = numbers.view(*levels.outer.shape, -1)
    levels.outer.copy_(runs.abs().amax(2) / _LARGEST_INNER)
    inner = (runs / levels.outer.float()[..., None]).nan_to_num().round().clamp(least, _LARGEST_INNER)
    levels.inner.copy_(inner.flatten(1))
