"""Matrix product of quantized rows with a 4-bit weight (W4A8).

32 neighbours along K share a whole number from -15 to 15 as their scale, a column has one more: a value of 4 bits times
the first is a byte, so that sums are those of int8, exact. (Scales of two levels: QServe, arXiv 2405.04532.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.linear import PANEL_COLUMNS
from shardline.runtime.ops.quantize_rows import GROUP_SIZE, QuantizedRows
from shardline.runtime.ops.storage import streamed_empty

_VALUE_BYTES = GROUP_SIZE * PANEL_COLUMNS // 2
_GROUP_BYTES = _VALUE_BYTES + PANEL_COLUMNS


@dataclass(frozen=True)
class Int4Weight:
    """A weight [out_features, in_features] as halves of bytes in panels of 64 output columns.

    A column's values and scales follow from its own weights, so any slice of columns may be packed alone.
    """

    panels: Tensor
    """[num_panels, number of groups, 1088] uint8: 32 x 64 values of 4 bits, then the 64 columns' int8 scales. On a GPU
    [pairs of groups, 34 * out_features]: for each column 32 bytes, a value of the first group in the low and one of the
    second in the high half, then the scales of the first group and those of the second."""
    scales: Tensor
    """[num_panels * 64] float32; on a GPU [out_features]."""
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes + self.scales.nbytes


def int4_empty(weight: Tensor, *leading: int, out_features: int | None = None) -> tuple[Tensor, Tensor]:
    """Room for the panels and scales of `leading` weights like this one, where it lies, or of as many outputs."""
    out_features, num_groups = out_features or weight.shape[0], -(-weight.shape[1] // GROUP_SIZE)
    if kernels(weight) is not _cpu:
        panels = weight.new_empty(*leading, -(-num_groups // 2), 34 * out_features, dtype=torch.uint8)
        return panels, weight.new_empty(*leading, out_features, dtype=torch.float32)
    num_panels = -(-out_features // PANEL_COLUMNS)
    panels = streamed_empty((*leading, num_panels, num_groups, _GROUP_BYTES), torch.uint8)
    return panels, torch.empty(*leading, num_panels * PANEL_COLUMNS, dtype=torch.float32)


def pack_int4(*parts: Tensor, panels: Tensor | None = None, scales: Tensor | None = None) -> Int4Weight:
    """A weight in parts [*, in_features], one under another, float32 or bfloat16; rows may be strided. `panels` and
    `scales`: where to pack it."""
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    if panels is None or scales is None:
        panels, scales = int4_empty(parts[0], out_features=out_features)
    if kernels(parts[0]) is _cpu:
        _pack_parts(parts, panels, scales)
        return Int4Weight(panels, scales, in_features, out_features)
    # The scales are searched for on the host, so that they are the CPU's.
    device, num_panels = parts[0].device, -(-out_features // PANEL_COLUMNS)
    on_host = torch.empty(num_panels, -(-in_features // GROUP_SIZE), _GROUP_BYTES, dtype=torch.uint8)
    host_scales = torch.empty(num_panels * PANEL_COLUMNS)
    _pack_parts([part.cpu() for part in parts], on_host, host_scales)
    packed = Int4Weight(on_host.to(device), host_scales.to(device), in_features, out_features)
    values, group_scales, column_scales = unpack_int4(packed)
    panels.copy_(pairs_of_groups(values, group_scales))
    scales.copy_(column_scales)
    return Int4Weight(panels, scales, in_features, out_features)


def _pack_parts(parts: Sequence[Tensor], panels: Tensor, scales: Tensor) -> None:
    first = 0
    for part in parts:
        _cpu.pack_int4(part, panels, scales, first)
        first += len(part)


def pairs_of_groups(values: Tensor, group_scales: Tensor) -> Tensor:
    """The panels of a GPU, of what `unpack_int4` gives."""
    rows, num_groups = group_scales.shape
    values = torch.nn.functional.pad(values, (0, num_groups % 2 * GROUP_SIZE))
    group_scales = torch.nn.functional.pad(group_scales, (0, num_groups % 2))
    first, second = (values + 8).to(torch.uint8).view(rows, -1, 2, GROUP_SIZE).unbind(2)
    both = (first | second << 4).transpose(0, 1).flatten(1)
    pairs = group_scales.view(rows, -1, 2).permute(1, 2, 0).contiguous()
    return torch.cat([both, pairs.view(torch.uint8).flatten(1)], dim=1)


def linear_int4(
    x: QuantizedRows, weight: Int4Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """x [M, K] times the weight's transpose, plus bias [N]: [M, N] of `out_dtype`.

    Products are summed exactly, in int32; in fp32 the sum is multiplied by the product of the scales of row and column,
    then the bias is added; one rounding ends it. For a packed weight the bits are the same on every ISA, and on a GPU.
    """
    if x.in_features != weight.in_features:
        raise ValueError(f"x has {x.in_features} features, the weight takes {weight.in_features}")
    on = kernels(x.values)
    out = on.activation_empty(out_dtype, x.values.shape[0], weight.out_features)
    on.linear_int4(x.values, x.scales, x.sums, x.in_features, weight.panels, weight.scales, bias, out)
    return out


def unpack_int4(weight: Int4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, K padded to whole groups] int8, scales of groups [N, number of groups] int8 and of columns [N]
    float32, of panels as the CPU's."""
    num_panels, num_groups, _ = weight.panels.shape
    pairs = weight.panels[:, :, :_VALUE_BYTES].reshape(num_panels, num_groups, 4, PANEL_COLUMNS, 4)
    values = torch.stack([pairs & 15, pairs >> 4], dim=3).to(torch.int8) - 8  # [.., pair, half, column, byte]
    values = values.permute(0, 4, 1, 2, 3, 5).reshape(num_panels * PANEL_COLUMNS, num_groups * GROUP_SIZE)
    scales = weight.panels[:, :, _VALUE_BYTES:].view(torch.int8)
    scales = scales.transpose(1, 2).reshape(num_panels * PANEL_COLUMNS, num_groups)
    rows = weight.out_features
    return values[:rows], scales[:rows], weight.scales[:rows]


def linear_int4_reference(
    x: QuantizedRows, weight: Int4Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`linear_int4` in plain torch: the same bits."""
    values, group_scales, column_scales = unpack_int4(weight)
    levels = values.long() * group_scales.long().repeat_interleave(GROUP_SIZE, dim=1)
    out = (x.values.long() @ levels.T).float() * (x.scales[:, None] * column_scales)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
