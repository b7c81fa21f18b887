"""W4A16: weights in 4 bits with a scale and a minimum for each 32 neighbours along K. Products read activations as they
are; many rows take longer than with `int4_fast`. On CPUs; GPUs have `int4_fast` under this name.

Where errors cost most, codes have more bits: 8 in the projections to keys and values, the embedding and the lm_head,
6 in those to queries and of attention's output, and in the one that closes a dense feed-forward block.

A minimum costs a byte for each group, and lets the 16 values of a group lie where its weights are. Scales and minimums
have two levels, as in GGUF's Q4_K: a byte for each group, times a number in float16 that up to 8 groups share. They are
chosen by the squared error.

Columns that read large weights of a norm are often smaller than their neighbours, and would be rounded to few levels.
So powers of two move from these weights to them first, see `folds_norms`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from shardline.weights.base import PackedLinear, Role
from shardline.weights.formats import int8_w8a16
from shardline.weights.formats.int8_w8a16 import group_of, num_groups, quantize_symmetric
from shardline.weights.grouped import GroupedWeight, TwoLevels

if TYPE_CHECKING:
    from torch import Tensor

    from shardline.kernels.contract import Kernels

OUTER_GROUPS = 8
"""The most groups that share the outer level of their numbers."""
_SIX_BITS: tuple[Role, ...] = ("attention", "down")


class NibbleKernels(Protocol):
    """What a back end offers for this format."""

    def quantize_nibbles(self, weight: Tensor, /) -> tuple[Tensor, TwoLevels, TwoLevels]:
        """(codes [N, K] uint8, scales, mins) of a dense weight, by the least squared error of each group of 32."""


class Format(int8_w8a16.Format):
    """See `base.WeightFormat`."""

    on_gpus: ClassVar[str] = "int4_fast"

    @property
    def label(self) -> str:
        return "int4"

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        if role in ("lm_head", "key_value"):
            return super().num_bytes(rows, columns, dtype_bytes, role)
        if role in _SIX_BITS:
            return rows * (-(-columns * 3 // 4) + 2 * num_groups(columns))
        return rows * (-(-columns // 2) + 2 * (num_groups(columns) + 2 * num_outer_groups(columns)))

    def pack_lm_head(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> PackedLinear:
        # No later layer averages out errors of the logits.
        return int8_w8a16.Format().pack_lm_head(kernels, weight)

    def hold(self, kernels: Kernels, weight: Tensor, role: Role) -> Tensor | GroupedWeight:
        if role == "key_value":
            return quantize_symmetric(kernels, weight, 8, self.label)
        return quantize_symmetric(kernels, weight, 6, self.label) if role in _SIX_BITS else weight

    def quantize(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> GroupedWeight:
        if isinstance(weight, GroupedWeight):
            return weight
        codes, scales, mins = cast("NibbleKernels", kernels).quantize_nibbles(weight)
        return GroupedWeight(
            codes,
            scales.multiply(),
            group_of(codes),
            mins=mins.multiply(),
            label=self.label,
            scale_levels=scales,
            min_levels=mins,
        )


def num_outer_groups(columns: int) -> int:
    """Runs of groups of a row that share their outer numbers, all of one size."""
    groups = num_groups(columns)
    return groups // math.gcd(groups, OUTER_GROUPS)
