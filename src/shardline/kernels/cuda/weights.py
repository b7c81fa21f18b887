"""Weights on a GPU, stored as rows [out_features, in_features], the layout that its products read; see
`base.WeightKernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.cuda.activations import empty_rows
from shardline.kernels.cuda.triton.linear import linear, linear_fp8, linear_int4, linear_int8
from shardline.kernels.cuda.triton.linear_w4a16 import linear_w4a16
from shardline.kernels.cuda.triton.mask import mask_tokens
from shardline.kernels.cuda.triton.quantize import quantize_rows_fp8
from shardline.kernels.cuda.triton.sampling import greedy_argmax
from shardline.kernels.cuda.w4a16 import (
    W4A16GatedLinear,
    W4A16Kernels,
    W4A16Linear,
    keeps_w4a16,
    pack_w4a16,
)
from shardline.kernels.host.panels import PanelKernels
from shardline.kernels.tensors import GROUP_SIZE, QuantizedRows
from shardline.weights.base import PackedExperts, Role
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference
from shardline.weights.formats.int8_fast import int8_weight_reference
from shardline.weights.grouped import GroupedWeight


class RowKernels:
    """Packing and products of the GPU."""

    linear = staticmethod(linear)
    linear_int8 = staticmethod(linear_int8)
    linear_int4 = staticmethod(linear_int4)
    linear_w4a16 = staticmethod(linear_w4a16)
    greedy_argmax = staticmethod(greedy_argmax)
    mask_tokens = staticmethod(mask_tokens)
    fp8_dtype = torch.float8_e4m3fn
    quantizes_fp8_rows = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def weight_empty(
        self,
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
        *,
        gated: bool = False,
        num_matrices: int | None = None,
    ) -> Tensor:
        return self._empty(dtype, num_matrices, 2 * out_features if gated else out_features, in_features)

    @staticmethod
    def pack_weight(weight: Tensor, panels: Tensor, first: int = 0, half: int | None = None) -> None:
        _place(panels, weight, first, half).copy_(weight)

    @staticmethod
    def unpack_rows(panels: Tensor, indices: Tensor, out: Tensor) -> None:
        torch.index_select(panels, 0, indices, out=out)

    def linear_argmax(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, allowed: Tensor | None
    ) -> Tensor:
        logits = empty_rows(self.device, torch.float32, len(x), out_features)
        self.linear(x, panels, bias, logits)
        return self._best(logits, allowed)

    def int8_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values [.., out_features, in_features padded to whole groups] int8 and scales [.., out_features]."""
        rows = 2 * out_features if gated else out_features
        depth = -(-in_features // GROUP_SIZE) * GROUP_SIZE
        values = self._empty(torch.int8, num_matrices, rows, depth)
        return values, self._empty(torch.float32, num_matrices, rows)

    @staticmethod
    def pack_int8(weight: Tensor, panels: Tensor, scales: Tensor, first: int = 0, half: int | None = None) -> None:
        values, row_scales = int8_weight_reference(weight)
        _place(panels, weight, first, half).copy_(F.pad(values, (0, panels.shape[1] - weight.shape[1])))
        _place(scales, weight, first, half).copy_(row_scales)

    def linear_int8_argmax(
        self,
        x: QuantizedRows,
        panels: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out_features: int,
        allowed: Tensor | None,
    ) -> Tensor:
        logits = empty_rows(self.device, torch.float32, len(x.values), out_features)
        self.linear_int8(*x[:4], panels, scales, bias, logits)
        return self._best(logits, allowed)

    def int4_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Panels [.., pairs of groups, 34 * out_features] uint8, for each pair: 32 bytes per column, each with a value
        of the first group in its low half and a value of the second group in its high half; then the columns' int8
        scales for the first group, and for the second. And scales [.., out_features]."""
        rows = 2 * out_features if gated else out_features
        pairs = -(-in_features // (2 * GROUP_SIZE))
        panels = self._empty(torch.uint8, num_matrices, pairs, (GROUP_SIZE + 2) * rows)
        return panels, self._empty(torch.float32, num_matrices, rows)

    @staticmethod
    def pack_int4(weight: Tensor, panels: Tensor, scales: Tensor, first: int = 0, half: int | None = None) -> None:
        # The host searches for the scales, so that they equal the CPU's.
        on_host = PanelKernels.int4_empty(*weight.shape)
        PanelKernels.pack_int4(weight.cpu(), *on_host)
        values, group_scales, column_scales = PanelKernels.unpack_int4(*on_host, len(weight))
        odd = group_scales.shape[1] % 2
        values, group_scales = F.pad(values, (0, odd * GROUP_SIZE)), F.pad(group_scales, (0, odd))
        low, high = (values + 8).to(torch.uint8).view(len(weight), -1, 2, GROUP_SIZE).unbind(2)
        value_rows, scale_rows = _parts_of_int4(panels, len(scales))
        _place(value_rows, weight, first, half).copy_(low | high << 4)
        _place(scale_rows, weight, first, half).copy_(group_scales.view(len(weight), -1, 2).view(torch.uint8))
        _place(scales, weight, first, half).copy_(column_scales)

    @staticmethod
    def unpack_int4(panels: Tensor, scales: Tensor, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
        value_rows, scale_rows = _parts_of_int4(panels, len(scales))
        values = torch.stack([value_rows & 15, value_rows >> 4], dim=2).flatten(1).to(torch.int8) - 8
        return values, scale_rows.contiguous().view(torch.int8).flatten(1), scales

    def fp8_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        rows = 2 * out_features if gated else out_features
        values = self._empty(torch.float8_e4m3fn, num_matrices, rows, in_features)
        return values, self._empty(torch.float32, num_matrices, rows)

    @staticmethod
    def pack_fp8(weight: Tensor, values: Tensor, scales: Tensor, first: int = 0, half: int | None = None) -> None:
        row_values, row_scales = quantize_rows_fp8_reference(weight, values.dtype)
        _place(values, weight, first, half).copy_(row_values)
        _place(scales, weight, first, half).copy_(row_scales)

    @staticmethod
    def linear_fp8(
        x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None
    ) -> None:
        rows = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        row_scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        quantize_rows_fp8(x, rows, row_scales)
        linear_fp8(rows, row_scales, values, scales, bias, out, gate)

    @staticmethod
    def keeps_grouped(parts: Sequence[GroupedWeight], role: Role) -> bool:
        return role == "layer" and all(map(keeps_w4a16, parts))

    def grouped_linear(self, parts: Sequence[GroupedWeight], rounds_x: bool = False) -> W4A16Linear:
        return W4A16Linear(cast("W4A16Kernels", self), pack_w4a16(parts), sum(len(part) for part in parts))

    def grouped_gated(self, gate: GroupedWeight, up: GroupedWeight, rounds_x: bool = False) -> W4A16GatedLinear:
        return W4A16GatedLinear(self.grouped_linear((gate, up)))

    @staticmethod
    def grouped_experts(num_experts: int, parts: Sequence[GroupedWeight], rounds_x: bool = False) -> PackedExperts:
        raise AssertionError("GPUs keep no experts packed")

    @staticmethod
    def pack_grouped_expert(experts: PackedExperts, index: int, parts: Sequence[GroupedWeight]) -> None:
        raise AssertionError("GPUs keep no experts packed")

    @staticmethod
    def pack_heads(weights: Tensor) -> Tensor:
        return weights.contiguous()

    def _best(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        """[M, 2]: the largest of each row of logits [M, N] fp32, and the bits of its column; see `PackedLinear.argmax`.
        Logits of columns that are not allowed are overwritten."""
        if allowed is not None:
            self.mask_tokens(logits, torch.arange(len(logits), device=logits.device), allowed.view(torch.int32))
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        self.greedy_argmax(logits, ids, values)
        return torch.stack([values, ids.to(torch.int32).view(torch.float32)], dim=1)

    def _empty(self, dtype: torch.dtype, num_matrices: int | None, *sizes: int) -> Tensor:
        leading = () if num_matrices is None else (num_matrices,)
        return torch.empty(*leading, *sizes, dtype=dtype, device=self.device)


def _place(rows: Tensor, weight: Tensor, first: int, half: int | None) -> Tensor:
    """The part of `rows` in which the rows of a weight belong."""
    start = first + (0 if half is None else half * (len(rows) // 2))
    return rows[start : start + len(weight)]


def _parts_of_int4(panels: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Views of a weight's values [rows, pairs, 32] and of its groups' scales [rows, pairs, 2]."""
    pairs = len(panels)
    values = panels[:, : GROUP_SIZE * num_rows].view(pairs, num_rows, GROUP_SIZE)
    scales = panels[:, GROUP_SIZE * num_rows :].view(pairs, 2, num_rows)
    return values.transpose(0, 1), scales.permute(2, 0, 1)
