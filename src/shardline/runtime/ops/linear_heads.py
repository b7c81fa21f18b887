"""A linear for every head, each with a weight of its own: how MLA's up-projections are absorbed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.linear import PANEL_COLUMNS
from shardline.runtime.ops.storage import streamed_empty


@dataclass(frozen=True)
class PackedHeads:
    """Weights [num_heads, out_features, in_features], each packed as in `linear.PackedWeight`."""

    panels: Tensor
    """[num_heads, num_panels, in_features (made even for bfloat16), PANEL_COLUMNS]; on a GPU as they were."""
    out_features: int


def pack_heads(weights: Tensor) -> PackedHeads:
    """weights: [num_heads, out_features, in_features], float32 or bfloat16."""
    num_heads, out_features, in_features = weights.shape
    if kernels(weights) is not _cpu:
        return PackedHeads(weights.contiguous(), out_features)
    depth = in_features + in_features % 2 if weights.dtype == torch.bfloat16 else in_features
    panels = streamed_empty((num_heads, -(-out_features // PANEL_COLUMNS), depth, PANEL_COLUMNS), weights.dtype)
    for head in range(num_heads):
        _cpu.pack_weight(weights[head].contiguous(), panels[head])
    return PackedHeads(panels, out_features)


def linear_heads(x: Tensor, weights: PackedHeads) -> Tensor:
    """x [T, num_heads, in_features] -> [T, num_heads, out_features]: head h times the transpose of weight h.

    Sums run over all of in_features in order, in fp32; one rounding ends it. Only a head of x must be contiguous.
    """
    on = kernels(x)
    out = on.activation_empty(x.dtype, x.shape[0], x.shape[1], weights.out_features)
    on.linear_heads(x, weights.panels, out)
    return out


def linear_heads_reference(x: Tensor, weights: Tensor) -> Tensor:
    """`linear_heads` in fp64, for unpacked weights [num_heads, out_features, in_features]."""
    return torch.einsum("thk,hnk->thn", x.double(), weights.double()).to(x.dtype)
