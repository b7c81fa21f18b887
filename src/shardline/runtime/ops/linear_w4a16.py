"""Matrix product of rows in bf16 or fp32 with a weight in 4 bits (W4A16); GPUs only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.runtime.ops.grouped_weight import GroupedWeight

PAIR_COLUMNS = 64
"""Of two runs of 32 columns, of which a byte holds one each. A run lies in one group."""


@dataclass(frozen=True)
class W4A16Weight:
    """A weight [out_features, in_features], ready to multiply."""

    values: Tensor
    """[pairs, out_features, 32] uint8: of a pair's columns the first 32 in the low four bits, the others in the high"""
    scales: Tensor
    """[groups, out_features]"""
    zeros: Tensor
    """[groups, out_features] uint8"""
    group_size: int
    """Columns of a group, a multiple of 32."""
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes


def pack_w4a16(weight: GroupedWeight) -> W4A16Weight:
    """Where `weight` is. A row's bytes follow from that row alone.

    Groups of the weight are multiples of 32 columns, and its first column is the first of a group.
    """
    num_columns, has_groups = weight.values.shape[1], weight.scales.shape[1] > 1
    group_size = int((weight.group_of == 0).sum()) if has_groups else num_columns
    places = torch.arange(num_columns, device=weight.group_of.device)
    assert torch.equal(weight.group_of, places // group_size), "groups begin with the columns"
    assert not has_groups or group_size % 32 == 0, "a run of 32 columns lies in one group"
    padded = F.pad(weight.values, (0, -num_columns % PAIR_COLUMNS))
    low, high = padded.view(len(weight), -1, 2, PAIR_COLUMNS // 2).transpose(0, 1).unbind(2)
    return W4A16Weight(
        (low | high << 4).contiguous(),
        weight.scales.T.contiguous(),
        weight.zeros.T.contiguous(),
        group_size,
        num_columns,
    )


def linear_w4a16(
    x: Tensor, weight: W4A16Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [M, K] times the weight's transpose, plus bias [N]: [M, N] of `out_dtype` (default: x's).

    Elements of the weight are rounded to x's dtype as they are multiplied, and summed in fp32 in the order of K: the
    bits are those of `linear` with the weight dequantized.
    """
    from shardline.runtime.ops import triton as on_gpu

    out = torch.empty(x.shape[0], weight.scales.shape[1], dtype=out_dtype or x.dtype, device=x.device)
    on_gpu.linear_w4a16(x, weight.values, weight.scales, weight.zeros, weight.group_size, bias, out)
    return out


def linear_w4a16_reference(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`linear_w4a16` with sums in fp64."""
    product = x.double() @ weight.dequantized(x.dtype).double().T
    if bias is not None:
        product = product + bias.double()
    return product.to(out_dtype or x.dtype)
