"""Matrix product with a weight packed once, at load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.storage import stacked_rows, streamed_empty

PANEL_COLUMNS = 64


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out_features, in_features] as panels of 64 output columns, zero-padded; on a GPU, as it was.

    A column's bits do not depend on where it sits, so any slice of a weight may be packed alone.
    """

    panels: Tensor
    """[num_panels, in_features (made even for bfloat16), PANEL_COLUMNS]; on a GPU [out_features, in_features]."""
    in_features: int
    out_features: int

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight as it was, [len(indices), in_features]: a tied embedding need not be held twice."""
        if self.panels.dim() == 2:
            return self.panels[indices]
        out = torch.empty(len(indices), self.in_features, dtype=self.dtype)
        _cpu.packed_rows(self.panels, indices.contiguous(), out)
        return out


def panel_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Shape of a weight's panels."""
    depth = in_features + in_features % 2 if dtype == torch.bfloat16 else in_features
    return -(-out_features // PANEL_COLUMNS), depth, PANEL_COLUMNS


def pack_weight(*parts: Tensor, panels: Tensor | None = None) -> PackedWeight:
    """A weight in parts [*, in_features], one under another, float32 or bfloat16; rows may be strided. `panels`: where
    to pack it. On the CPU each part goes straight to its columns, so that nobody need stack them first."""
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    if kernels(parts[0]) is not _cpu:
        weight = stacked_rows(parts)
        weight = weight.contiguous() if panels is None else panels.copy_(weight)
        return PackedWeight(weight, in_features, out_features)
    if panels is None:
        panels = streamed_empty(panel_shape(out_features, in_features, parts[0].dtype), parts[0].dtype)
    first = 0
    for part in parts:
        _cpu.pack_weight(part, panels, first)
        first += len(part)
    return PackedWeight(panels, in_features, out_features)


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K] times the weight's transpose, plus bias [N]: [M, N] of `out_dtype` (default: x's).

    Sums run over all of K in order, in fp32; the bias is added in fp32; one rounding ends it. `out` may be a slice of
    columns of a wider tensor.
    """
    on = kernels(x)
    if out is None:
        out = on.activation_empty(out_dtype or x.dtype, x.shape[0], weight.out_features)
    elif out.shape[1] != weight.out_features:
        raise ValueError(f"out has {out.shape[1]} columns, the weight {weight.out_features}")
    if x.shape[1] != weight.in_features:
        raise ValueError(f"x has {x.shape[1]} features, the weight takes {weight.in_features}")
    on.linear(x, weight.panels, bias, out)
    return out


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`linear` in fp64, for an unpacked weight [N, K]."""
    product = x.double() @ weight.double().T
    if bias is not None:
        product = product + bias.double()
    return product.to(out_dtype or x.dtype)
