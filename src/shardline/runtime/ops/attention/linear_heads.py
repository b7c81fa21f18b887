"""A linear with a separate weight for every head; MLA absorbs its up-projections this way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels


@dataclass(frozen=True)
class PackedHeads:
    """Weights [num_heads, out_features, in_features], each packed as one plain weight."""

    panels: Tensor
    out_features: int


def pack_heads(kernels: Kernels, weights: Tensor) -> PackedHeads:
    """weights: [num_heads, out_features, in_features], float32 or bfloat16."""
    return PackedHeads(kernels.pack_heads(weights), weights.shape[1])


def linear_heads(kernels: Kernels, x: Tensor, weights: PackedHeads) -> Tensor:
    """x [T, num_heads, in_features] -> [T, num_heads, out_features]: head h times the transpose of weight h.

    Sums run over all of in_features in order, in fp32, and are rounded once. Each head of x must be contiguous; the
    other strides are free.
    """
    out = kernels.activation_empty(x.dtype, x.shape[0], x.shape[1], weights.out_features)
    kernels.linear_heads(x, weights.panels, out)
    return out


def linear_heads_reference(x: Tensor, weights: Tensor) -> Tensor:
    """`linear_heads` in fp64, for unpacked weights [num_heads, out_features, in_features]."""
    return torch.einsum("thk,hnk->thn", x.double(), weights.double()).to(x.dtype)
