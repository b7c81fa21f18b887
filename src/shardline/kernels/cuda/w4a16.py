"""Weights of 4-bit integers with zero points, as GPTQ and AWQ store them: the GPU dequantizes them in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.tensors import LinearInput, as_tensor, features_error
from shardline.weights.base import PackedGatedLinear, PackedLinear
from shardline.weights.grouped import GroupedWeight

PAIR_COLUMNS = 64
"""Columns of a pair of runs: two runs of 32 columns. A byte holds one column of each run. A run lies in one group."""


@dataclass(frozen=True)
class W4A16Weight:
    """A weight [out_features, in_features], ready to multiply."""

    values: Tensor
    """[pairs, out_features, 32] uint8. A pair is two runs of 32 columns, each run in one group. A byte holds a column
    of the first run in its low four bits and a column of the second run in its high four bits."""
    scales: Tensor
    """[groups, out_features]"""
    zeros: Tensor
    """[groups, out_features] uint8"""
    group_size: int
    """Number of columns of a group, a multiple of 32."""
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes


class W4A16Kernels(Protocol):
    """The GPU's kernels that these weights call."""

    def activation_empty(self, dtype: torch.dtype, /, *sizes: int) -> Tensor: ...
    def activation(self, x: Tensor, out: Tensor, name: str, gated: bool, /) -> None: ...
    def linear_w4a16(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor,
        group_size: int,
        bias: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...


@dataclass(frozen=True)
class W4A16Linear(PackedLinear):
    """See `base.PackedLinear`.

    Elements of the weight are rounded to x's dtype before they are multiplied, and products are summed in fp32 in the
    order of K. So the bits are those of a plain linear with the dequantized weight.
    """

    kernels: W4A16Kernels
    weight: W4A16Weight
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        rows, weight = as_tensor(x), self.weight
        if rows.shape[1] != weight.in_features:
            raise features_error(rows.shape[1], weight.in_features)
        out = self.kernels.activation_empty(out_dtype or rows.dtype, rows.shape[0], self.out_features)
        self.kernels.linear_w4a16(rows, weight.values, weight.scales, weight.zeros, weight.group_size, bias, out)
        return out


@dataclass(frozen=True)
class W4A16GatedLinear(PackedGatedLinear):
    """See `base.PackedGatedLinear`."""

    both: W4A16Linear

    @property
    def nbytes(self) -> int:
        return self.both.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        product, kernels = self.both(x, bias), self.both.kernels
        out = kernels.activation_empty(product.dtype, product.shape[0], product.shape[1] // 2)
        kernels.activation(product, out, activation, True)
        return out


def keeps_w4a16(weight: GroupedWeight) -> bool:
    """Whether a weight can be packed so: integers of 4 bits with zero points, in groups of neighbours that are a
    multiple of 32, or in one group a row."""
    if weight.bits != 4 or weight.zeros is None or weight.table is not None or weight.mins is not None:
        return False
    size = _group_size(weight)
    places = torch.arange(len(weight.group_of), device=weight.group_of.device)
    is_whole = size == len(places) or size % 32 == 0
    return is_whole and torch.equal(weight.group_of, places // max(1, size))


def pack_w4a16(parts: Sequence[GroupedWeight]) -> W4A16Weight:
    """Pack the rows of all parts, stacked in order; all parts have the same groups. A row's bytes depend only on that
    row."""
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    zeros = torch.cat([part.zeros for part in parts if part.zeros is not None])
    num_columns = values.shape[1]
    padded = F.pad(values, (0, -num_columns % PAIR_COLUMNS))
    low, high = padded.view(len(values), -1, 2, PAIR_COLUMNS // 2).transpose(0, 1).unbind(2)
    return W4A16Weight(
        (low | high << 4).contiguous(),
        scales.T.contiguous(),
        zeros.T.contiguous(),
        _group_size(parts[0]),
        num_columns,
    )


def _group_size(weight: GroupedWeight) -> int:
    return int((weight.group_of == 0).sum()) if weight.scales.shape[1] > 1 else len(weight.group_of)
