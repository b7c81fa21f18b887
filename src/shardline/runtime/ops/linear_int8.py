"""Matrix product of quantized rows with an int8 weight that has one scale per output column (W8A8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.linear import PANEL_COLUMNS
from shardline.runtime.ops.quantize_rows import GROUP_SIZE, QuantizedRows
from shardline.runtime.ops.storage import stacked_rows, streamed_empty

_QUAD = 4


@dataclass(frozen=True)
class Int8Weight:
    """A weight [out_features, in_features] as bytes in panels of 64 output columns.

    A column's bytes and scale follow from its own weights, so any slice of columns may be packed alone.
    """

    panels: Tensor
    """[num_panels, in_features / 4, 64, 4] uint8: 128 + value, padded with values of zero; on a GPU [out_features,
    in_features padded to whole groups] int8."""
    scales: Tensor
    """[num_panels * 64] float32; on a GPU [out_features]."""
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes + self.scales.nbytes


def int8_empty(weight: Tensor, *leading: int, out_features: int | None = None) -> tuple[Tensor, Tensor]:
    """Room for the panels and scales of `leading` weights like this one, where it lies, or of as many outputs."""
    out_features, in_features = out_features or weight.shape[0], weight.shape[1]
    if kernels(weight) is not _cpu:
        panels = weight.new_empty(*leading, out_features, -(-in_features // GROUP_SIZE) * GROUP_SIZE, dtype=torch.int8)
        return panels, weight.new_empty(*leading, out_features, dtype=torch.float32)
    num_panels = -(-out_features // PANEL_COLUMNS)
    panels = streamed_empty((*leading, num_panels, -(-in_features // _QUAD), PANEL_COLUMNS, _QUAD), torch.uint8)
    return panels, torch.empty(*leading, num_panels * PANEL_COLUMNS, dtype=torch.float32)


def pack_int8(*parts: Tensor, panels: Tensor | None = None, scales: Tensor | None = None) -> Int8Weight:
    """A weight in parts [*, in_features], one under another, float32 or bfloat16; rows may be strided. `panels` and
    `scales`: where to pack it."""
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    if panels is None or scales is None:
        panels, scales = int8_empty(parts[0], out_features=out_features)
    if kernels(parts[0]) is _cpu:
        first = 0
        for part in parts:
            _cpu.pack_int8(part, panels, scales, first)
            first += len(part)
    else:
        values, row_scales = int8_weight_reference(stacked_rows(parts))
        panels.copy_(torch.nn.functional.pad(values, (0, panels.shape[1] - in_features)))
        scales.copy_(row_scales)
    return Int8Weight(panels, scales, in_features, out_features)


def linear_int8(
    x: QuantizedRows, weight: Int8Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """x [M, K] times the weight's transpose, plus bias [N]: [M, N] of `out_dtype`.

    Products are summed exactly, in int32; in fp32 the sum is multiplied by the product of both scales, then the bias
    is added; one rounding ends it. The bits are the same on every ISA, and on a GPU.
    """
    if x.in_features != weight.in_features:
        raise ValueError(f"x has {x.in_features} features, the weight takes {weight.in_features}")
    on = kernels(x.values)
    out = on.activation_empty(out_dtype, x.values.shape[0], weight.out_features)
    on.linear_int8(x.values, x.scales, x.sums, x.in_features, weight.panels, weight.scales, bias, out)
    return out


def int8_weight_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `pack_int8` makes of a weight [N, K]: values [N, K] int8 and scales [N]."""
    magnitude = weight.float().abs().amax(1, keepdim=True)
    inverse = torch.where(magnitude < 1e-36, 0.0, torch.full_like(magnitude, 127) / magnitude)
    scales = torch.where(magnitude < 1e-36, 0.0, magnitude / 127)
    return (weight.float() * inverse).round().to(torch.int8), scales[:, 0]


def linear_int8_reference(
    x: QuantizedRows, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`linear_int8` in plain torch, for an unpacked weight [N, K]: the same bits."""
    values, scales = int8_weight_reference(weight)
    sums = x.values[:, : x.in_features].long() @ values.long().T
    out = sums.float() * (x.scales[:, None] * scales)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
