"""Weights in fewer bits, unpacked a matrix at a time for each product.

Sums of bytes are exact in float32 if they are short enough, whatever the order, so int8 and int4 have the bits that all
other back ends give them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.host.panels import PanelKernels
from shardline.kernels.tensors import GROUP_SIZE, QuantizedRows, RowBias
from shardline.kernels.torch.elementwise import quantize_rows, quantized_width
from shardline.kernels.torch.linear import COLUMNS, DenseKernels, best_of, place_rows, split_bias
from shardline.weights.base import PackedExperts, PackedGatedLinear, PackedLinear, Role
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference
from shardline.weights.formats.int8_fast import int8_weight_reference
from shardline.weights.grouped import GroupedWeight
from shardline.weights.rotation import num_parts, rotate_reference
from shardline.weights.rows import quantize_rows_reference

_EXACT_DEPTH = 1024
"""Products of bytes of which float32 holds any sum: 127 * 127 * 1024 is below 2^24."""
_GROUP_BYTES = GROUP_SIZE // 2 + 1


class FormatKernels(DenseKernels):
    """See `int8.Int8Kernels`, `int4.Int4Kernels` and `fp8.Fp8Kernels`."""

    fp8_dtype = torch.float8_e4m3fn
    quantizes_fp8_rows = False

    def quantized_empty(self, num_rows: int, in_features: int, dtype: torch.dtype) -> QuantizedRows:
        width = quantized_width(in_features)
        return QuantizedRows(
            self.activation_empty(torch.int8, num_rows, width),
            self.activation_empty(torch.float32, num_rows),
            self.activation_empty(torch.int32, num_rows, 1 + width // GROUP_SIZE),
            in_features,
            dtype,
        )

    def int8_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values [.., out_features, in_features padded to whole groups] int8 and scales [.., out_features]."""
        shape = self._shape(out_features, gated, num_matrices)
        values = self.weights_empty(torch.int8, *shape, quantized_width(in_features))
        return values, self.weights_empty(torch.float32, *shape)

    @staticmethod
    def pack_int8(
        weight: Tensor, panels: Tensor, scales: Tensor, first: int = 0, half: int | None = None, rotated: bool = False
    ) -> None:
        if rotated:
            weight = rotate_reference(weight) / num_parts(weight.shape[1])
        values, row_scales = int8_weight_reference(weight)
        padded = F.pad(values, (0, panels.shape[1] - weight.shape[1]))
        place_rows(panels, len(weight), first, half).copy_(padded)
        place_rows(scales, len(weight), first, half).copy_(row_scales)

    @staticmethod
    def quantize_rotated(x: Tensor, values: Tensor, scales: Tensor, sums: Tensor) -> None:
        quantize_rows(rotate_reference(x), values, scales, sums)

    def linear_int8(
        self,
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        depth: int,
        panels: Tensor,
        column_scales: Tensor,
        bias: Tensor | RowBias | None,
        out: Tensor,
        gate: str | None = None,
    ) -> None:
        bias, change = split_bias(bias)
        product = change(multiply_bytes(values, scales, panels, column_scales, bias))
        if gate is None:
            out.copy_(product)
        else:
            self.activation(product.to(out.dtype), out, gate, True)

    def linear_int8_argmax(
        self,
        x: QuantizedRows,
        panels: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out_features: int,
        allowed: Tensor | None,
    ) -> Tensor:
        return best_of(multiply_bytes(x.values, x.scales, panels, scales, bias), allowed)

    def int4_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Panels [.., out_features, number of groups, 17] uint8: for each group 16 bytes of two values, those of the
        first half of the group in their low bits, then the group's scale. And scales [.., out_features]."""
        shape = self._shape(out_features, gated, num_matrices)
        groups = quantized_width(in_features) // GROUP_SIZE
        panels = self.weights_empty(torch.uint8, *shape, groups, _GROUP_BYTES)
        return panels, self.weights_empty(torch.float32, *shape)

    @staticmethod
    def pack_int4(weight: Tensor, panels: Tensor, scales: Tensor, first: int = 0, half: int | None = None) -> None:
        # The host searches for the scales, so that they equal those of all other back ends.
        on_host = PanelKernels.int4_empty(*weight.shape)
        PanelKernels.pack_int4(weight.cpu(), *on_host)
        values, group_scales, column_scales = PanelKernels.unpack_int4(*on_host, len(weight))
        low, high = (values + 8).to(torch.uint8).view(*group_scales.shape, 2, GROUP_SIZE // 2).unbind(2)
        rows = torch.cat([low | high << 4, group_scales[..., None].contiguous().view(torch.uint8)], -1)
        place_rows(panels, len(weight), first, half).copy_(rows)
        place_rows(scales, len(weight), first, half).copy_(column_scales)

    @staticmethod
    def unpack_int4(panels: Tensor, scales: Tensor, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
        values, group_scales = _split_int4(panels[:out_features])
        return values.flatten(1), group_scales[..., 0], scales[:out_features]

    def linear_int4(
        self,
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        depth: int,
        panels: Tensor,
        column_scales: Tensor,
        bias: Tensor | RowBias | None,
        out: Tensor,
        gate: str | None = None,
    ) -> None:
        self.linear_int8(values, scales, sums, depth, _bytes_of_int4(panels), column_scales, bias, out, gate)

    def fp8_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tiles of values, and scales [.., rows of these tiles]."""
        values = self.weight_empty(self.fp8_dtype, out_features, in_features, gated=gated, num_matrices=num_matrices)
        return values, self.weights_empty(torch.float32, *values.shape[:-3], values.shape[-3] * COLUMNS).zero_()

    @staticmethod
    def pack_fp8(weight: Tensor, values: Tensor, scales: Tensor, first: int = 0, half: int | None = None) -> None:
        row_values, row_scales = quantize_rows_fp8_reference(weight, values.dtype)
        place_rows(values.flatten(0, 1), len(weight), first, half).copy_(row_values)
        place_rows(scales, len(weight), first, half).copy_(row_scales)

    def linear_fp8(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | RowBias | None,
        out: Tensor,
        gate: str | None = None,
    ) -> None:
        self.linear(x, _dense_fp8(values, scales, x.dtype), bias, out, gate)

    def multiply_packed(
        self,
        x: Tensor,
        panels: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        out_features: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """x [M, K] times one matrix of a `PackedExperts`, plus bias: [M, out_features] of `dtype`."""
        if panels.dtype in (torch.int8, torch.uint8):
            assert scales is not None
            rows, held = quantize_rows_reference(x), panels if panels.dtype == torch.int8 else _bytes_of_int4(panels)
            return multiply_bytes(rows.values, rows.scales, held, scales, bias).to(dtype)
        tiles = panels if scales is None else _dense_fp8(panels, scales, x.dtype)
        return self.multiply(x, tiles, bias, dtype)[:, :out_features]

    @staticmethod
    def keeps_grouped(parts: Sequence[GroupedWeight], role: Role) -> bool:
        return False

    @staticmethod
    def grouped_linear(parts: Sequence[GroupedWeight], rounds_x: bool = False) -> PackedLinear:
        raise AssertionError("deployment.formats has packed weights dequantized")

    @staticmethod
    def grouped_gated(gate: GroupedWeight, up: GroupedWeight, rounds_x: bool = False) -> PackedGatedLinear:
        raise AssertionError("deployment.formats has packed weights dequantized")

    @staticmethod
    def grouped_experts(num_experts: int, parts: Sequence[GroupedWeight], rounds_x: bool = False) -> PackedExperts:
        raise AssertionError("deployment.formats has packed weights dequantized")

    @staticmethod
    def _shape(out_features: int, gated: bool, num_matrices: int | None) -> tuple[int, ...]:
        leading = () if num_matrices is None else (num_matrices,)
        return *leading, 2 * out_features if gated else out_features


def multiply_bytes(
    values: Tensor, scales: Tensor, weight: Tensor, column_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Rows of bytes [M, K] times the transpose of bytes [N, K], plus bias: [M, N] float32."""
    total = torch.zeros(len(values), len(weight), dtype=torch.int32, device=values.device)
    for first in range(0, values.shape[1], _EXACT_DEPTH):
        part = slice(first, first + _EXACT_DEPTH)
        total += (values[:, part].float() @ weight[:, part].float().T).to(torch.int32)
    product = total.float() * (scales[:, None] * column_scales)
    return product if bias is None else product + bias.float()


def _bytes_of_int4(panels: Tensor) -> Tensor:
    """[N, K] int8: the values of a weight times the scales of their groups."""
    values, group_scales = _split_int4(panels)
    return (values * group_scales).flatten(1)


def _split_int4(panels: Tensor) -> tuple[Tensor, Tensor]:
    """Values [N, number of groups, 32] and scales [N, number of groups, 1], int8."""
    pairs = panels[..., :-1]
    values = torch.cat([pairs & 15, pairs >> 4], -1).to(torch.int8) - 8
    return values, panels[..., -1:].contiguous().view(torch.int8)


def _dense_fp8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The tiles of a weight, each element rounded once."""
    return (values.float() * scales.view(-1, COLUMNS, 1)).to(dtype)
