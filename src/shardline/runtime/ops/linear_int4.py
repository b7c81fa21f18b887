"""Matrix product of quantized rows with a 4-bit weight that has one scale per column and 32 neighbours of K (W4A8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.linear import PANEL_COLUMNS
from shardline.runtime.ops.quantize_rows import GROUP_SIZE, QuantizedRows
from shardline.runtime.ops.storage import streamed_empty

_VALUE_BYTES = GROUP_SIZE * PANEL_COLUMNS // 2
_GROUP_BYTES = _VALUE_BYTES + 2 * PANEL_COLUMNS


@dataclass(frozen=True)
class Int4Weight:
    """A weight [out_features, in_features] as halves of bytes in panels of 64 output columns.

    A column's values and scales follow from its own weights, so any slice of columns may be packed alone.
    """

    panels: Tensor
    """[num_panels, number of groups, 1152] uint8: 32 x 64 values of 4 bits, then 64 bfloat16 scales. On a GPU [pairs of
    groups, 36 * out_features]: for each column 32 bytes, a value of the first group in the low and one of the second in
    the high half, then the bfloat16 scales of the first group and those of the second."""
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes


def int4_empty(weight: Tensor, *leading: int) -> Tensor:
    """Room for the panels of `leading` weights like this one, where it lies."""
    out_features, num_groups = weight.shape[0], -(-weight.shape[1] // GROUP_SIZE)
    if kernels(weight) is not _cpu:
        return weight.new_empty(*leading, -(-num_groups // 2), 36 * out_features, dtype=torch.uint8)
    return streamed_empty((*leading, -(-out_features // PANEL_COLUMNS), num_groups, _GROUP_BYTES), torch.uint8)


def pack_int4(weight: Tensor, panels: Tensor | None = None) -> Int4Weight:
    """weight: [out_features, in_features], float32 or bfloat16; rows may be strided. `panels`: where to pack it."""
    out_features, in_features = weight.shape
    if panels is None:
        panels = int4_empty(weight)
    if kernels(weight) is _cpu:
        _cpu.pack_int4(weight, panels)
        return Int4Weight(panels, in_features, out_features)
    # The scales are searched for on the host, so that they are the CPU's.
    shape = (-(-out_features // PANEL_COLUMNS), -(-in_features // GROUP_SIZE), _GROUP_BYTES)
    on_host = torch.empty(shape, dtype=torch.uint8)
    _cpu.pack_int4(weight.cpu(), on_host)
    panels.copy_(pairs_of_groups(*unpack_int4(Int4Weight(on_host.to(weight.device), in_features, out_features))))
    return Int4Weight(panels, in_features, out_features)


def pairs_of_groups(values: Tensor, scales: Tensor) -> Tensor:
    """The panels of a GPU, of what `unpack_int4` gives."""
    rows, num_groups = scales.shape
    values = torch.nn.functional.pad(values, (0, num_groups % 2 * GROUP_SIZE))
    scales = torch.nn.functional.pad(scales, (0, num_groups % 2)).to(torch.bfloat16)
    first, second = (values + 8).to(torch.uint8).view(rows, -1, 2, GROUP_SIZE).unbind(2)
    both = (first | second << 4).transpose(0, 1).flatten(1)
    pairs = scales.view(rows, -1, 2).permute(1, 2, 0).contiguous()
    return torch.cat([both, pairs.view(torch.uint8).flatten(1)], dim=1)


def linear_int4(
    x: QuantizedRows, weight: Int4Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """x [M, K] times the weight's transpose, plus bias [N]: [M, N] of `out_dtype`.

    Products of a group are summed exactly, in int32; the groups' sums times their scales are added in fp32 in the
    order of K, then multiplied by the row's scale; the bias is added; one rounding ends it.
    """
    if x.in_features != weight.in_features:
        raise ValueError(f"x has {x.in_features} features, the weight takes {weight.in_features}")
    on = kernels(x.values)
    out = on.activation_empty(out_dtype, x.values.shape[0], weight.out_features)
    on.linear_int4(x.values, x.scales, x.sums, x.in_features, weight.panels, bias, out)
    return out


def unpack_int4(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """Values [N, K padded to whole groups] int8 and scales [N, number of groups] float32 of panels as the CPU's."""
    num_panels, num_groups, _ = weight.panels.shape
    pairs = weight.panels[:, :, :_VALUE_BYTES].reshape(num_panels, num_groups, 4, PANEL_COLUMNS, 4)
    values = torch.stack([pairs & 15, pairs >> 4], dim=3).to(torch.int8) - 8  # [.., pair, half, column, byte]
    values = values.permute(0, 4, 1, 2, 3, 5).reshape(num_panels * PANEL_COLUMNS, num_groups * GROUP_SIZE)
    scales = weight.panels[:, :, _VALUE_BYTES:].contiguous().view(torch.bfloat16).float()
    scales = scales.transpose(1, 2).reshape(num_panels * PANEL_COLUMNS, num_groups)
    return values[: weight.out_features], scales[: weight.out_features]


def linear_int4_reference(
    x: QuantizedRows, weight: Int4Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`linear_int4` with exact sums, and floating point in fp64."""
    values, scales = unpack_int4(weight)
    num_groups = scales.shape[1]
    rows = x.values.view(-1, num_groups, GROUP_SIZE).transpose(0, 1).long()
    sums = rows @ values.view(-1, num_groups, GROUP_SIZE).permute(1, 2, 0).long()  # [groups, M, N]
    out = (sums.double() * scales.T[:, None].double()).sum(0) * x.scales[:, None].double()
    if bias is not None:
        out = out + bias.double()
    return out.to(out_dtype)
