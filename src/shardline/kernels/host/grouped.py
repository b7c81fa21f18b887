"""Weights of 4, 6 or 8 bits on the CPU: panels of codes, with scales, mins and zero points per group of columns.

An output is the sum over groups, in order, of scale * (sum of x * value(code)) - min * (sum of x); see
csrc/cpu/gemm/gemm_grouped.cpp. On a path with a bf16 dot instruction, values are exact in bf16, or the sum of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.group_panels import GroupNumbers, fill_panels, numbers_empty, rows_of_panels
from shardline.kernels.host.grouped_forms import (
    OCTET,
    Rounding,
    can_multiply,
    have_one_form,
    integer_table,
    packed_groups,
    rounding_of,
    runs_of_one_form,
    same_table,
)
from shardline.kernels.host.memory import streamed_empty
from shardline.kernels.host.panels import PANEL_COLUMNS, PanelKernels, choose_best
from shardline.kernels.page_cache import row_slices
from shardline.kernels.tensors import GROUP_SIZE, LinearInput, as_tensor, features_error
from shardline.weights.base import ExpertRounding, GroupScales, PackedExperts, PackedGatedLinear, PackedLinear, Role
from shardline.weights.formats import int4, int8_fast, int8_w8a16
from shardline.weights.grouped import GroupedWeight, TwoLevels

if TYPE_CHECKING:
    from shardline.kernels.contract import Kernels

_ROWS_TOGETHER = 256


@dataclass(frozen=True)
class GroupedPanels:
    """A weight [out_features, in_features] as `_cpu.linear_grouped` reads it; a gated pair shares panels."""

    panels: Tensor
    """[num_panels, in_features / 8, 64 * bits] uint8"""
    scales: Tensor
    """[num_panels, G, 64] float16, bfloat16 or float32, or two levels in bytes; see `_level_panels`"""
    mins: Tensor | None
    """[num_panels, G, 64] float32, or two levels in bytes"""
    zeros: Tensor | None
    """[num_panels, G, 64] uint8, if groups have zero points of their own"""
    table: Tensor | None
    """[2^bits] float32, if there are no such zero points"""
    group_size: int
    order: Tensor | None
    """[in_features] int32: the column of x that belongs to each packed column; None: the same"""
    in_features: int
    out_features: int
    """Columns of the output; of a gated pair, those of one half."""
    rounding: Rounding | None = None
    """How x is rounded to e4m3; None: it is not."""

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        held = (self.panels, self.scales, self.mins, self.zeros, self.order)
        return sum(part.nbytes for part in held if part is not None)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None) -> None:
        """x [M, in_features] times the transpose, plus bias, to out [M, out_features]; its rows may be strided."""
        rows, sums = self._arrange(x)
        _cpu.linear_grouped(rows, sums, *self._weight(), bias, out, gate)

    def dequantize_rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, [len(indices), in_features], with the bits of `GroupedWeight.dequantize`."""
        codes = torch.empty(len(indices), self.in_features, dtype=torch.uint8)
        _cpu.packed_codes(self.panels, indices.contiguous(), codes)
        group_of = torch.arange(self.in_features) // self.group_size
        if self.order is not None:
            place = self.order.argsort()
            codes, group_of = codes[:, place], group_of[place]
        panels, columns = indices // PANEL_COLUMNS, indices % PANEL_COLUMNS
        scales, zeros, mins = (
            None if part is None else rows_of_panels(part, panels, columns)
            for part in (self.scales, self.zeros, self.mins)
        )
        assert scales is not None
        return GroupedWeight(codes, scales, group_of, zeros, mins, self.table).dequantize(dtype)

    def find_best(self, x: Tensor, bias: Tensor | None, allowed: Tensor | None) -> Tensor:
        """See `PackedLinear.argmax`."""
        rows, sums = self._arrange(x)
        best = _cpu.activation_empty(torch.float32, rows.shape[0], 2, len(self.panels))
        _cpu.linear_grouped_best(rows, sums, *self._weight(), bias, self.out_features, allowed, best)
        return choose_best(best)

    def _weight(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, int]:
        return self.panels, self.scales, self.mins, self.zeros, self.table, self.group_size

    def _arrange(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x in the order of the packed columns, and rounded if need be; with the sums of its groups if there are mins,
        or their scales if they are rounded."""
        if x.shape[1] != self.in_features:
            raise features_error(x.shape[1], self.in_features)
        rows = x
        if self.order is not None:
            rows = _cpu.activation_empty(x.dtype, *x.shape)
            _cpu.gather_columns(x, self.order, rows)
        if self.mins is None and self.rounding is None:
            return rows, None
        groups = _cpu.activation_empty(torch.float32, rows.shape[0], -(-self.in_features // self.group_size))
        if self.rounding is None:
            _cpu.sum_groups(rows, self.group_size, groups)
            return rows, groups
        rounded = _cpu.activation_empty(x.dtype, *x.shape)
        _cpu.round_rows_e4m3(rows, self.group_size, *self.rounding, rounded, groups)
        return rounded, groups


@dataclass(frozen=True)
class GroupedLinear(PackedLinear):
    """See `base.PackedLinear`. Parts of one form share panels; each other part has a product of its own."""

    weights: tuple[GroupedPanels, ...]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(weight.out_features for weight in self.weights)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        rows = as_tensor(x)
        out = _cpu.activation_empty(out_dtype or rows.dtype, rows.shape[0], self.out_features)
        first = 0
        for weight in self.weights:
            columns = slice(first, first + weight.out_features)
            weight.multiply(rows, None if bias is None else bias[..., columns], out[:, columns])
            first = columns.stop
        return out

    def row_reader(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        return partial(self.weights[0].dequantize_rows, dtype=dtype) if len(self.weights) == 1 else None

    def argmax(self, x: LinearInput, bias: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        (weight,) = self.weights
        return weight.find_best(as_tensor(x), bias, allowed)


@dataclass(frozen=True)
class GroupedGatedLinear(PackedGatedLinear):
    """See `base.PackedGatedLinear`. Both weights have one form."""

    weight: GroupedPanels

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        rows = as_tensor(x)
        out = _cpu.activation_empty(rows.dtype, rows.shape[0], self.weight.out_features)
        self.weight.multiply(rows, bias, out, activation)
        return out


@dataclass(frozen=True)
class SeparateGatedLinear(PackedGatedLinear):
    """See `base.PackedGatedLinear`. The weights have unlike forms, so the gate is applied to rounded products."""

    both: PackedLinear

    @property
    def nbytes(self) -> int:
        return self.both.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        product = self.both(x, bias)
        out = _cpu.activation_empty(product.dtype, product.shape[0], product.shape[1] // 2)
        _cpu.activation(product, out, activation, True)
        return out


class GroupedPanelKernels(PanelKernels):
    """The CPU's part of `packed.GroupedKernels`."""

    @staticmethod
    def keeps_grouped(parts: Sequence[GroupedWeight], role: Role) -> bool:
        """All but groups of columns of unlike or odd sizes, and values of 8-bit codes that bf16 does not hold. Experts
        have one form besides."""
        if not all(can_multiply(part) for part in parts):
            return False
        return role != "expert" or all(have_one_form(parts[0], part) for part in parts)

    @staticmethod
    def quantize_nibbles(weight: Tensor) -> tuple[Tensor, TwoLevels, TwoLevels]:
        """See `int4.NibbleKernels`."""
        num_rows, columns = weight.shape
        codes = torch.empty(num_rows, columns, dtype=torch.uint8)
        inner, outer = (num_rows, int8_w8a16.num_groups(columns)), (num_rows, int4.num_outer_groups(columns))
        scales, mins = (
            TwoLevels(torch.empty(inner, dtype=torch.int8), torch.empty(outer, dtype=torch.float16)) for _ in range(2)
        )
        start = 0
        for some in row_slices(weight):
            rows = slice(start, start + len(some))
            _cpu.quantize_nibbles(some, codes[rows], *scales.select_rows(rows), *mins.select_rows(rows))
            start = rows.stop
        return codes, scales, mins

    @staticmethod
    def quantize_bytes(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """See `int8_w8a16.ByteKernels`."""
        num_rows, columns = weight.shape
        codes = torch.empty(num_rows, columns, dtype=torch.uint8)
        scales, start = torch.empty(num_rows, int8_w8a16.num_groups(columns), dtype=torch.bfloat16), 0
        for some in row_slices(weight):
            rows = slice(start, start + len(some))
            if bits == 8:
                _cpu.quantize_bytes(some, codes[rows], scales[rows])
            else:
                _quantize_symmetric(some, bits, codes[rows], scales[rows])
            start = rows.stop
        return codes, scales

    def grouped_linear(self, parts: Sequence[GroupedWeight], rounds_x: bool = False) -> PackedLinear:
        if _are_integers(parts):
            return int8_fast.keep_linear(_all(self), parts)
        runs = runs_of_one_form(parts, rounds_x)
        return GroupedLinear(tuple(pack_grouped(run, rounds_x=rounds_x) for run in runs))

    def grouped_gated(self, gate: GroupedWeight, up: GroupedWeight, rounds_x: bool = False) -> PackedGatedLinear:
        if _are_integers((gate, up)):
            return int8_fast.keep_gated(_all(self), gate, up)
        if have_one_form(gate, up, rounds_x):
            return GroupedGatedLinear(pack_grouped((gate, up), gated=True, rounds_x=rounds_x))
        return SeparateGatedLinear(self.grouped_linear((gate, up), rounds_x))

    def grouped_experts(
        self, num_experts: int, parts: Sequence[GroupedWeight], rounds_x: bool = False
    ) -> PackedExperts:
        if _are_integers(parts):
            return int8_fast.allocate_kept_experts(_all(self), num_experts, parts)
        first, num_rows = parts[0], sum(len(part) for part in parts)
        groups, table = packed_groups(first), _expert_table(first)
        shape = num_experts, -(-num_rows // PANEL_COLUMNS)

        scales = GroupScales(
            *numbers_empty(parts, shape, groups, has_zeros=table is None),
            table,
            groups.size,
            None if groups.order is None else streamed_empty((num_experts, first.values.shape[1]), torch.int32),
            _expert_rounding(num_experts, first) if rounds_x else None,
        )
        in_features = first.values.shape[1]
        panels = streamed_empty((*shape, *_octets(in_features, first.bits)), torch.uint8)
        return PackedExperts(panels, scales, in_features, num_rows)

    def pack_grouped_expert(self, experts: PackedExperts, index: int, parts: Sequence[GroupedWeight]) -> None:
        held = experts.scales
        if isinstance(held, GroupScales) == _are_integers(parts):
            raise ValueError("only some experts of a layer are in int8; use --quantization none")
        if not isinstance(held, GroupScales):
            int8_fast.keep_expert(_all(self), experts, index, parts)
            return
        if held.table is not None and not all(same_table(_expert_table(part), held.table) for part in parts):
            raise ValueError("the experts of a layer have unlike zero points; use --quantization none")
        if held.rounding is not None:
            held.rounding.scales[index] = max(part.input_scale for part in parts)
        groups = packed_groups(parts[0])
        if (groups.order is None) != (held.order is None):
            raise ValueError("only some experts of a layer have groups out of order; use --quantization none")
        if held.order is not None and groups.order is not None:
            held.order[index] = groups.order
        mins, zeros = (None if part is None else part[index] for part in (held.mins, held.zeros))
        numbers = GroupNumbers(held.scales[index], mins, zeros)
        fill_panels(parts, experts.panels[index], numbers, groups, gated=False)


def pack_grouped(parts: Sequence[GroupedWeight], *, gated: bool = False, rounds_x: bool = False) -> GroupedPanels:
    """Pack weights of one form: stacked, or the gate and up. If all groups share a zero point, it becomes a part of the
    table. `rounds_x`: whether x is rounded for e4m3 weights."""
    first = parts[0]
    groups = packed_groups(first)
    in_features = first.values.shape[1]
    num_rows = len(first) if gated else sum(len(part) for part in parts)
    num_panels = -(-num_rows // (PANEL_COLUMNS // 2 if gated else PANEL_COLUMNS))
    panels = streamed_empty((num_panels, *_octets(in_features, first.bits)), torch.uint8)
    zeros = [
        part.zeros if part.shared_zero is not None else part.zeros[:, groups.ids]
        for part in parts
        if part.zeros is not None
    ]
    table = integer_table(first.bits, zeros) if first.table is None else first.table
    numbers = numbers_empty(parts, (num_panels,), groups, has_zeros=table is None)
    fill_panels(parts, panels, numbers, groups, gated)
    return GroupedPanels(
        panels=panels,
        scales=numbers.scales,
        mins=numbers.mins,
        zeros=numbers.zeros,
        table=table,
        group_size=groups.size,
        order=None if groups.order is None else groups.order.to(torch.int32),
        in_features=in_features,
        out_features=num_rows,
        rounding=rounding_of(first) if rounds_x else None,
    )


def _quantize_symmetric(weight: Tensor, bits: int, codes: Tensor, scales: Tensor) -> None:
    """What `_cpu.quantize_bytes` does for 8 bits; some rows at a time, since their numbers take four bytes."""
    middle, columns = 1 << bits - 1, weight.shape[1]
    for start in range(0, len(weight), _ROWS_TOGETHER):
        rows = slice(start, start + _ROWS_TOGETHER)
        padded = torch.nn.functional.pad(weight[rows].float(), (0, -columns % GROUP_SIZE))
        groups = padded.view(len(padded), -1, GROUP_SIZE)
        scales[rows] = groups.abs().amax(2) / (middle - 1)
        inverse = scales[rows, :, None].float().reciprocal()
        levels = (groups * inverse.masked_fill_(~inverse.isfinite(), 0)).nan_to_num_()
        codes[rows] = levels.round_().clamp_(1 - middle, middle - 1).add_(middle).flatten(1)[:, :columns]


def _are_integers(parts: Sequence[GroupedWeight]) -> bool:
    """Whether the file's format multiplies 8-bit integers."""
    return all(part.quantizes_input for part in parts)


def _all(kernels: GroupedPanelKernels) -> Kernels:
    """The back end's kernels, of which these are a part."""
    return cast("Kernels", kernels)


def _expert_rounding(num_experts: int, first: GroupedWeight) -> ExpertRounding | None:
    """How the rows of experts like `first` are rounded; their scales are filled in as they are packed."""
    rounding = rounding_of(first)
    return None if rounding is None else ExpertRounding(torch.zeros(num_experts), rounding.bound)


def _expert_table(weight: GroupedWeight) -> Tensor | None:
    """The table of the codes of an expert; None: it has several zero points."""
    if weight.table is not None:
        return weight.table
    return integer_table(weight.bits, [] if weight.zeros is None else [weight.zeros])


def _octets(in_features: int, bits: int) -> tuple[int, int]:
    """Number of octets of a panel, and bytes of one."""
    return -(-in_features // OCTET), OCTET * PANEL_COLUMNS * bits // 8
