"""W4A16: weights in 4 bits with a scale and a minimum for each 32 neighbours along K, the lm_head in 8 bits. Products
read activations as they are; many rows take longer than with `int4_fast`. On CPUs.

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

    on_gpus: ClassVar[str] = "int4_fast"

    @property
    def label(self) -> str:
        return "int4"

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
            values, held = in_groups(weight[rows]), (scales.select_rows(rows), mins.select_rows(rows))
            _set_levels(*held, values)
            codes[rows] = _codes(values, *_lines(*held)).flatten(1)[:, : weight.shape[1]].byte()
        return GroupedWeight(
            codes,
            scales.multiply(),
            group_of(codes),
            mins=mins.multiply(),
            label=self.label,
            scale_levels=scales,
            min_levels=mins,
        )


def _set_levels(scales: TwoLevels, mins: TwoLevels, values: Tensor) -> None:
    """Choose the scales and minimums of groups [N, G, 32]: the levels next to those that fit best, or levels with which
    all weights are in range, whichever has the smaller squared error."""
    scale, low = _fit(values)
    for levels, numbers in ((scales, scale), (mins, low)):
        outer = numbers.abs().view(*levels.outer.shape, -1).amax(2) / _LARGEST_INNER
        levels.outer.copy_(outer + (outer - outer))  # NaN, if it is not finite
    _set_inner(scales, _in_levels(scales, scale).round(), least=1)
    _set_inner(mins, _in_levels(mins, -low).round())
    near, near_error = (scales.inner.clone(), mins.inner.clone()), _error(values, *_lines(scales, mins))
    _set_inner(mins, _in_levels(mins, -low).ceil())
    _set_inner(scales, _in_levels(scales, (values.amax(2) + mins.multiply()) / _LARGEST_CODE).ceil(), least=1)
    is_near = near_error <= _error(values, *_lines(scales, mins))
    for levels, inner in zip((scales, mins), near, strict=True):
        levels.inner.copy_(inner.where(is_near, levels.inner))


def _fit(values: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, smallest values) [N, G] of groups: of the line from the smallest to the largest weight, and of the line
    that fits the codes of this one best, the one with the smaller squared error."""
    low = values.amin(2)
    scale = (values.amax(2) - low) / _LARGEST_CODE
    codes = _codes(values, scale, low)
    code_mean, mean = codes.mean(2, keepdim=True), values.mean(2, keepdim=True)
    off = codes - code_mean
    fitted = ((off * (values - mean)).sum(2) / off.square().sum(2)).nan_to_num()
    fitted_low = mean[..., 0] - fitted * code_mean[..., 0]
    is_better = _error(values, fitted, fitted_low) < _error(values, scale, low)
    return fitted.where(is_better, scale), fitted_low.where(is_better, low)


def _codes(values: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The nearest codes, as floats."""
    return ((values - low[..., None]) / scale[..., None]).nan_to_num().round().clamp(0, _LARGEST_CODE)


def _error(values: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The squared error [N, G] of groups."""
    return (_codes(values, scale, low) * scale[..., None] + low[..., None] - values).square().sum(2)


def _lines(scales: TwoLevels, mins: TwoLevels) -> tuple[Tensor, Tensor]:
    """(scales, smallest values) [N, G]."""
    return scales.multiply(), -mins.multiply()


def _in_levels(levels: TwoLevels, numbers: Tensor) -> Tensor:
    """Numbers [N, G] as multiples of their outer ones."""
    runs = numbers.view(*levels.outer.shape, -1) / levels.outer.float()[..., None]
    return runs.nan_to_num().flatten(1)


def _set_inner(levels: TwoLevels, inner: Tensor, least: int = -_LARGEST_INNER) -> None:
    levels.inner.copy_(inner.clamp(least, _LARGEST_INNER))
