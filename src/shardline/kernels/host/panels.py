"""Weights in zero-padded panels of 64 output columns, the layout that the C++ products read.

A column's bits do not depend on its position, so any slice of a weight may be packed alone. A gated pair shares panels:
32 columns of the gate are followed by the same 32 columns of up, so that one product computes both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.memory import streamed_empty
from shardline.kernels.page_cache import row_slices
from shardline.kernels.tensors import GROUP_SIZE, QuantizedRows

PANEL_COLUMNS = 64
_QUAD = 4
_BYTE_OF_ZERO = 128
_VALUE_BYTES = GROUP_SIZE * PANEL_COLUMNS // 2
_GROUP_BYTES = _VALUE_BYTES + PANEL_COLUMNS


def _num_panels(out_features: int, gated: bool) -> int:
    return -(-out_features // (PANEL_COLUMNS // 2 if gated else PANEL_COLUMNS))


def panel_shape(
    out_features: int, in_features: int, dtype: torch.dtype, *, gated: bool = False
) -> tuple[int, int, int]:
    """Shape of a plain weight's panels: [num_panels, in_features (made even for bfloat16), 64]."""
    depth = in_features + in_features % 2 if dtype == torch.bfloat16 else in_features
    return _num_panels(out_features, gated), depth, PANEL_COLUMNS


def _places(weight: Tensor, first: int, half: int | None) -> Iterator[tuple[Tensor, int, int]]:
    """The rows of a weight, some at a time, with the panel and the column in it from which they are packed."""
    for rows in row_slices(weight):
        yield (rows, 0, first) if half is None else (rows, first // (PANEL_COLUMNS // 2), 0)
        first += len(rows)


class PanelKernels:
    """The CPU's weight kernels: see `base.WeightKernels`, `int8_fast.Int8Kernels` and `int4_fast.Int4Kernels`."""

    linear = staticmethod(_cpu.linear)
    linear_int8 = staticmethod(_cpu.linear_int8)
    linear_int4 = staticmethod(_cpu.linear_int4)
    unpack_rows = staticmethod(_cpu.packed_rows)

    @staticmethod
    def pack_weight(weight: Tensor, panels: Tensor, first: int = 0, half: int | None = None) -> None:
        for rows, panel, column in _places(weight, first, half):
            _cpu.pack_weight(rows, panels[panel:], column, half)

    @staticmethod
    def pack_int8(
        weight: Tensor,
        panels: Tensor,
        scales: Tensor,
        first: int = 0,
        half: int | None = None,
        *,
        rotated: bool = False,
    ) -> None:
        """`rotated`: the parts of rows are mixed, and divided by their number."""
        for rows, panel, column in _places(weight, first, half):
            _cpu.pack_int8(rows, panels[panel:], scales[panel * PANEL_COLUMNS :], column, half, rotated)

    @staticmethod
    def pack_int4(weight: Tensor, panels: Tensor, scales: Tensor, first: int = 0, half: int | None = None) -> None:
        for rows, panel, column in _places(weight, first, half):
            _cpu.pack_int4(rows, panels[panel:], scales[panel * PANEL_COLUMNS :], column, half)

    @staticmethod
    def weight_empty(
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
        *,
        gated: bool = False,
        num_matrices: int | None = None,
    ) -> Tensor:
        leading = () if num_matrices is None else (num_matrices,)
        return streamed_empty((*leading, *panel_shape(out_features, in_features, dtype, gated=gated)), dtype)

    @staticmethod
    def linear_argmax(
        x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, allowed: Tensor | None
    ) -> Tensor:
        best = _cpu.activation_empty(torch.float32, x.shape[0], 2, len(panels))
        _cpu.linear_best(x, panels, bias, out_features, allowed, best)
        return choose_best(best)

    @staticmethod
    def int8_empty(
        out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Panels [.., num_panels, in_features / 4, 64, 4] uint8: 128 + value, padded with values of zero; and scales
        [.., num_panels * 64]."""
        leading = () if num_matrices is None else (num_matrices,)
        num_panels = _num_panels(out_features, gated)
        panels = streamed_empty((*leading, num_panels, -(-in_features // _QUAD), PANEL_COLUMNS, _QUAD), torch.uint8)
        return panels, torch.empty(*leading, num_panels * PANEL_COLUMNS, dtype=torch.float32)

    @staticmethod
    def keep_int8(codes: Tensor, panels: Tensor, half: int | None = None) -> None:
        num_panels, quads, width, _ = panels.shape
        if half is not None:
            width //= 2
            panels = panels[:, :, half * width : (half + 1) * width]
        for panel in range(num_panels):
            rows = codes[panel * width : (panel + 1) * width]
            missing = (0, quads * _QUAD - rows.shape[1], 0, width - len(rows))
            padded = torch.nn.functional.pad(rows, missing, value=_BYTE_OF_ZERO)
            panels[panel].copy_(padded.view(width, quads, _QUAD).transpose(0, 1))

    @staticmethod
    def linear_int8_argmax(
        x: QuantizedRows,
        panels: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out_features: int,
        allowed: Tensor | None,
    ) -> Tensor:
        best = _cpu.activation_empty(torch.float32, x.values.shape[0], 2, len(panels))
        _cpu.linear_int8_best(*x[:4], panels, scales, bias, out_features, allowed, best)
        return choose_best(best)

    @staticmethod
    def int4_empty(
        out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Panels [.., num_panels, number of groups, 1088] uint8: 32 x 64 values of 4 bits, then the int8 scales of the
        64 columns. And scales [.., num_panels * 64]."""
        leading = () if num_matrices is None else (num_matrices,)
        num_panels = _num_panels(out_features, gated)
        panels = streamed_empty((*leading, num_panels, -(-in_features // GROUP_SIZE), _GROUP_BYTES), torch.uint8)
        return panels, torch.empty(*leading, num_panels * PANEL_COLUMNS, dtype=torch.float32)

    @staticmethod
    def unpack_int4(panels: Tensor, scales: Tensor, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
        num_panels, num_groups, _ = panels.shape
        pairs = panels[:, :, :_VALUE_BYTES].reshape(num_panels, num_groups, 4, PANEL_COLUMNS, 4)
        values = torch.stack([pairs & 15, pairs >> 4], dim=3).to(torch.int8) - 8  # [.., pair, half, column, byte]
        values = values.permute(0, 4, 1, 2, 3, 5).reshape(num_panels * PANEL_COLUMNS, num_groups * GROUP_SIZE)
        group_scales = panels[:, :, _VALUE_BYTES:].view(torch.int8)
        group_scales = group_scales.transpose(1, 2).reshape(num_panels * PANEL_COLUMNS, num_groups)
        return values[:out_features], group_scales[:out_features], scales[:out_features]

    @staticmethod
    def pack_heads(weights: Tensor) -> Tensor:
        """[num_heads, num_panels, in_features (made even for bfloat16), 64]."""
        num_heads, out_features, in_features = weights.shape
        panels = streamed_empty((num_heads, *panel_shape(out_features, in_features, weights.dtype)), weights.dtype)
        for head in range(num_heads):
            _cpu.pack_weight(weights[head].contiguous(), panels[head])
        return panels


def choose_best(best: Tensor) -> Tensor:
    """The best over all panels, [M, 2], from the best of each panel [M, 2, panels]."""
    pairs = _cpu.activation_empty(torch.float32, best.shape[0], 2)
    _cpu.choose_best(best, pairs)
    return pairs
