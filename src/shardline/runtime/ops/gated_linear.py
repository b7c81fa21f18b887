"""Two products of the same rows, of which one gates the other: act(x gate^T) * (x up^T).

One kernel computes both, and writes and reads neither. On the CPU a panel of the weight holds 32 columns of the gate
and the same 32 of up, and all is in fp32 until one rounding. On a GPU the bits are those of a linear followed by
`gated_activation`: both products are rounded first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.activation import ActivationName, gated_activation_reference
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.linear import PANEL_COLUMNS, PackedWeight, linear_reference, pack_weight, panel_shape
from shardline.runtime.ops.linear_int4 import Int4Weight, int4_empty, pack_int4
from shardline.runtime.ops.linear_int8 import Int8Weight, int8_empty, pack_int8
from shardline.runtime.ops.quantize_rows import QuantizedRows
from shardline.runtime.ops.storage import streamed_empty

_HALF = PANEL_COLUMNS // 2


def pack_gate_up(gate: Tensor, up: Tensor) -> PackedWeight:
    """gate and up [I, K] packed for `gated_linear`: on the CPU a panel has half its columns of each."""
    if kernels(gate) is not _cpu:
        return pack_weight(gate, up)
    columns = _gated_columns(len(gate))
    panels = streamed_empty(panel_shape(columns, gate.shape[1], gate.dtype), gate.dtype)
    _pack_halves(_cpu.pack_weight, gate, up, panels)
    return PackedWeight(panels, gate.shape[1], columns)


def pack_gate_up_int8(gate: Tensor, up: Tensor) -> Int8Weight:
    """As `pack_gate_up`, for `gated_linear_int8`."""
    if kernels(gate) is not _cpu:
        return pack_int8(gate, up)
    columns = _gated_columns(len(gate))
    panels, scales = int8_empty(gate, out_features=columns)
    _pack_halves(_cpu.pack_int8, gate, up, panels, scales)
    return Int8Weight(panels, scales, gate.shape[1], columns)


def pack_gate_up_int4(gate: Tensor, up: Tensor) -> Int4Weight:
    """As `pack_gate_up`, for `gated_linear_int4`."""
    if kernels(gate) is not _cpu:
        return pack_int4(gate, up)
    columns = _gated_columns(len(gate))
    panels, scales = int4_empty(gate, out_features=columns)
    _pack_halves(_cpu.pack_int4, gate, up, panels, scales)
    return Int4Weight(panels, scales, gate.shape[1], columns)


def _pack_halves(pack: Callable[..., None], gate: Tensor, up: Tensor, *into: Tensor) -> None:
    """Into the first half of every panel the gate's columns, into the second those of up."""
    for half, part in enumerate((gate, up)):
        pack(part, *into, half=half)


def _gated_columns(width: int) -> int:
    """Columns of the panels of a gate and an up of `width` outputs."""
    return -(-width // _HALF) * PANEL_COLUMNS


def gated_linear(x: Tensor, weight: PackedWeight, width: int, bias: Tensor | None, name: ActivationName) -> Tensor:
    """act(x gate^T + bias[:I]) * (x up^T + bias[I:]): [M, I] of x's dtype, for x [M, K], I = `width`, bias [2 * I].

    `weight`: of `pack_gate_up`.
    """
    _check_features(x.shape[1], weight.in_features)
    on = kernels(x)
    out = on.activation_empty(x.dtype, x.shape[0], width)
    on.linear(x, weight.panels, bias, out, name)
    return out


def gated_linear_int8(
    x: QuantizedRows,
    weight: Int8Weight,
    width: int,
    bias: Tensor | None,
    name: ActivationName,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`gated_linear` with the products of `linear_int8`, rounded to `out_dtype`."""
    _check_features(x.in_features, weight.in_features)
    on = kernels(x.values)
    out = on.activation_empty(out_dtype, x.values.shape[0], width)
    on.linear_int8(x.values, x.scales, x.sums, x.in_features, weight.panels, weight.scales, bias, out, name)
    return out


def gated_linear_int4(
    x: QuantizedRows,
    weight: Int4Weight,
    width: int,
    bias: Tensor | None,
    name: ActivationName,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`gated_linear` with the products of `linear_int4`, rounded to `out_dtype`."""
    _check_features(x.in_features, weight.in_features)
    on = kernels(x.values)
    out = on.activation_empty(out_dtype, x.values.shape[0], width)
    on.linear_int4(x.values, x.scales, x.sums, x.in_features, weight.panels, weight.scales, bias, out, name)
    return out


def gated_linear_reference(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, name: ActivationName) -> Tensor:
    """`gated_linear` in fp64, rounded once, for gate and up [I, K]."""
    product = linear_reference(x, torch.cat([gate, up]), bias, out_dtype=torch.float64)
    return gated_activation_reference(product, name).to(x.dtype)


def _check_features(features: int, expected: int) -> None:
    if features != expected:
        raise ValueError(f"x has {features} features, the weight takes {expected}")
