"""Dense weights in fp8 on the CPU: panels of bytes, whose columns have a scale each."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.grouped import GroupedPanelKernels
from shardline.kernels.host.grouped_forms import E4M3_TABLE, OCTET
from shardline.kernels.host.memory import streamed_empty
from shardline.kernels.host.panels import PANEL_COLUMNS
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference

_FP8_ROWS = 256
"""Rows that are quantized at a time, since it takes several times their memory."""


class Fp8PanelKernels(GroupedPanelKernels):
    """The CPU's part of `fp8.Fp8Kernels`: one group a row."""

    fp8_dtype = torch.float8_e4m3fn
    quantizes_fp8_rows = False

    @staticmethod
    def fp8_empty(
        out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Panels [.., num_panels, in_features / 8, 512] uint8 and scales [.., num_panels, 1, 64]."""
        leading = () if num_matrices is None else (num_matrices,)
        num_panels = -(-out_features // (PANEL_COLUMNS // 2 if gated else PANEL_COLUMNS))
        panels = streamed_empty((*leading, num_panels, -(-in_features // OCTET), OCTET * PANEL_COLUMNS), torch.uint8)
        return panels, torch.zeros(*leading, num_panels, 1, PANEL_COLUMNS)

    @staticmethod
    def pack_fp8(weight: Tensor, values: Tensor, scales: Tensor, first: int = 0, half: int | None = None) -> None:
        codes, row_scales = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(len(weight))
        for start in range(0, len(weight), _FP8_ROWS):
            rows = slice(start, start + _FP8_ROWS)
            row_values, row_scales[rows] = quantize_rows_fp8_reference(weight[rows], torch.float8_e4m3fn)
            codes[rows] = row_values.view(torch.uint8)
        _cpu.pack_codes(codes, values, first, half)
        if half is None:
            scales.view(-1)[first : first + len(row_scales)] = row_scales
            return
        width = PANEL_COLUMNS // 2
        padded = torch.nn.functional.pad(row_scales, (0, -len(row_scales) % width))
        scales.view(-1, 2, width)[:, half] = padded.view(-1, width)

    @staticmethod
    def linear_fp8(
        x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None
    ) -> None:
        size = values.shape[1] * OCTET
        _cpu.linear_grouped(x, None, values, scales, None, None, E4M3_TABLE, size, bias, out, gate)
