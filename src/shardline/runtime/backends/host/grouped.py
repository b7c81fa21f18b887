"""Weights of 4- and 8-bit codes on the CPU: panels of codes, with scales, mins and zero points per group of columns.

An output is the sum over groups, in order, of scale * (sum of x * value(code)) - min * (sum of x); see
csrc/cpu/gemm/gemm_grouped.cpp. On a path with a bf16 dot instruction, values are exact in bf16, or the sum of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.backends.host.memory import streamed_empty
from shardline.runtime.backends.host.panels import PANEL_COLUMNS, PanelKernels, choose_best
from shardline.weights.base import PackedGatedLinear, PackedLinear, Role
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference
from shardline.weights.grouped import GroupedWeight
from shardline.weights.rows import LinearInput, as_tensor, check_features

OCTET = 8
"""Neighbours along K that are packed together; a group of columns is a multiple of it."""
E4M3_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of each byte in float8_e4m3fn."""
_LARGEST_ZERO = 16
_MIDDLE = 128
"""The zero point of 8-bit codes that the table includes. Others are folded into the mins."""


@dataclass(frozen=True)
class GroupedPanels:
    """A weight [out_features, in_features] as `_cpu.linear_grouped` reads it; a gated pair shares panels."""

    panels: Tensor
    """[num_panels, in_features / 8, 256 or 512] uint8"""
    scales: Tensor
    """[num_panels, G, 64] float16, bfloat16 or float32"""
    mins: Tensor | None
    """[num_panels, G, 64] float32"""
    zeros: Tensor | None
    """[num_panels, G, 64] uint8, for 4-bit codes"""
    table: Tensor | None
    """[16 or 256] float32, if there are no zero points"""
    group_size: int
    order: Tensor | None
    """[in_features] int32: the column of x that belongs to each packed column; None: the same"""
    in_features: int
    out_features: int
    """Columns of the output; of a gated pair, those of one half."""

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        held = (self.panels, self.scales, self.mins, self.zeros, self.order)
        return sum(part.nbytes for part in held if part is not None)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None) -> None:
        """x [M, in_features] times the transpose, plus bias, to out [M, out_features]; its rows may be strided."""
        rows, sums = self._arrange(x)
        _cpu.linear_grouped(rows, sums, *self._weight(), bias, out, gate)

    def find_best(self, x: Tensor, bias: Tensor | None, allowed: Tensor | None) -> Tensor:
        """See `PackedLinear.argmax`."""
        rows, sums = self._arrange(x)
        best = _cpu.activation_empty(torch.float32, rows.shape[0], 2, len(self.panels))
        _cpu.linear_grouped_best(rows, sums, *self._weight(), bias, self.out_features, allowed, best)
        return choose_best(best)

    def _weight(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, int]:
        return self.panels, self.scales, self.mins, self.zeros, self.table, self.group_size

    def _arrange(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x in the order of the packed columns, and the sums of its groups if there are mins."""
        check_features(x.shape[1], self.in_features)
        rows = x
        if self.order is not None:
            rows = _cpu.activation_empty(x.dtype, *x.shape)
            _cpu.gather_columns(x, self.order, rows)
        if self.mins is None:
            return rows, None
        sums = _cpu.activation_empty(torch.float32, rows.shape[0], self.scales.shape[1])
        _cpu.sum_groups(rows, self.group_size, sums)
        return rows, sums


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
            weight.multiply(rows, None if bias is None else bias[columns], out[:, columns])
            first = columns.stop
        return out

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

    both: GroupedLinear

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
    def keeps_grouped(weight: GroupedWeight, role: Role) -> bool:
        """All but groups of columns of unlike or odd sizes, and values of 8-bit codes that bf16 does not hold."""
        exact = weight.bits == 4 or weight.table is None or _is_exact(weight.table)
        return exact and _regular_groups(weight.group_of) is not None

    @staticmethod
    def grouped_linear(parts: Sequence[GroupedWeight]) -> GroupedLinear:
        return GroupedLinear(tuple(pack_grouped(run) for run in _runs_of_one_form(parts)))

    @staticmethod
    def grouped_gated(gate: GroupedWeight, up: GroupedWeight) -> PackedGatedLinear:
        if _have_one_form(gate, up):
            return GroupedGatedLinear(pack_grouped((gate, up), gated=True))
        return SeparateGatedLinear(GroupedPanelKernels.grouped_linear((gate, up)))


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
        codes, row_scales = quantize_rows_fp8_reference(weight, torch.float8_e4m3fn)
        _cpu.pack_codes(codes.view(torch.uint8), values, first, half)
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


def pack_grouped(parts: Sequence[GroupedWeight], *, gated: bool = False) -> GroupedPanels:
    """Pack weights of one form: stacked, or the gate and up. A row's bytes depend on this row, and on whether all zero
    points of these weights are equal."""
    first = parts[0]
    groups = _regular_groups(first.group_of)
    assert groups is not None, "layers dequantize weights with other groups"
    order, group_size, ids = groups
    in_features = first.values.shape[1]
    num_rows = len(first) if gated else sum(len(part) for part in parts)
    num_panels = -(-num_rows // (PANEL_COLUMNS // 2 if gated else PANEL_COLUMNS))
    panels = streamed_empty(
        (num_panels, -(-in_features // OCTET), OCTET * PANEL_COLUMNS * first.bits // 8), torch.uint8
    )
    start = 0
    for half, part in enumerate(parts):
        codes = part.values if order is None else part.values[:, order]
        _cpu.pack_codes(codes, panels, 0 if gated else start, half if gated else None)
        start += len(part)
    dtype = first.scales.dtype if len({part.scales.dtype for part in parts}) == 1 else torch.float32
    scales = [part.scales[:, ids].to(dtype) for part in parts]
    mins = [part.mins[:, ids] for part in parts if part.mins is not None]
    zeros = [part.zeros[:, ids] for part in parts if part.zeros is not None]
    table = first.table
    if table is None:
        table, zeros, mins = _integer_table(first.bits, scales, zeros, mins)
    return GroupedPanels(
        panels=panels,
        scales=_in_panels(scales, gated),
        mins=_in_panels(mins, gated) if mins else None,
        zeros=_in_panels(zeros, gated) if zeros else None,
        table=table,
        group_size=group_size,
        order=None if order is None else order.to(torch.int32),
        in_features=in_features,
        out_features=num_rows,
    )


def unpack_codes(panels: Tensor, out_features: int, in_features: int) -> Tensor:
    """[out_features, in_features] uint8: the inverse of `_cpu.pack_codes` for a weight that is not gated."""
    num_panels, octets, size = panels.shape
    if size == OCTET * PANEL_COLUMNS // 2:
        words = panels.view(num_panels, octets, PANEL_COLUMNS, 2, 2)  # [.., column, k % 2, half of the word]
        codes = torch.stack([words & 15, words >> 4], dim=-1).view(num_panels, octets, PANEL_COLUMNS, 2, 4)
        codes = codes.transpose(3, 4).transpose(1, 2)
    else:
        words = panels.view(num_panels, octets, 2, PANEL_COLUMNS // 4, 2, 4, 2)  # [.., half, columns, pair, column, k]
        codes = words.permute(0, 3, 5, 1, 2, 4, 6)
    return codes.reshape(num_panels * PANEL_COLUMNS, octets * OCTET)[:out_features, :in_features]


def _integer_table(
    bits: int, scales: Sequence[Tensor], zeros: list[Tensor], mins: list[Tensor]
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """The table, zero points and mins of integer codes. Zero points remain only where 4-bit codes have several."""
    codes = torch.arange(1 << bits, dtype=torch.float32)
    if not zeros:
        return codes, [], mins
    if bits == 4:
        used = torch.bincount(torch.cat([part.flatten() for part in zeros])).nonzero()[:, 0].tolist()
        if used and used[-1] > _LARGEST_ZERO:
            raise ValueError(f"a zero point of 4-bit codes is {used[-1]}, above {_LARGEST_ZERO}")
        if len(used) <= 1:
            return codes - float(sum(used)), [], mins
        return None, zeros, mins
    shifts = [part.float() - _MIDDLE for part in zeros]
    if not any(bool(shift.any()) for shift in shifts):
        return codes - _MIDDLE, [], mins
    # q - z = (q - 128) - (z - 128), and all of the second term is the group's.
    added = [scale.float() * shift for scale, shift in zip(scales, shifts, strict=True)]
    totals = [one + other for one, other in zip(added, mins, strict=True)] if mins else added
    return codes - _MIDDLE, [], totals


def _in_panels(parts: Sequence[Tensor], gated: bool) -> Tensor:
    """Rows [N, G] of stacked parts, or of the gate and up, as [num_panels, G, 64], padded with zeros."""
    width = PANEL_COLUMNS // 2 if gated else PANEL_COLUMNS
    stacks = parts if gated else [torch.cat(list(parts))]
    padded = [torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % width)) for rows in stacks]
    panels = torch.cat([rows.view(-1, width, rows.shape[1]) for rows in padded], dim=1).transpose(1, 2)
    return streamed_empty(panels.shape, panels.dtype).copy_(panels)


def _regular_groups(group_of: Tensor) -> tuple[Tensor | None, int, Tensor] | None:
    """The order in which columns are packed (None: theirs), the size of a group, and the groups in that order; None if
    the groups differ in size (the last may be smaller) or are no multiple of an octet."""
    is_sorted = bool((group_of[1:] >= group_of[:-1]).all())
    order = None if is_sorted else group_of.argsort(stable=True)
    counts = torch.bincount(group_of)
    ids = counts.nonzero()[:, 0]
    counts = counts[ids]
    if len(ids) == 1:
        return order, -(-len(group_of) // OCTET) * OCTET, ids
    size = int(counts[0])
    if size % OCTET or bool((counts[:-1] != size).any()) or int(counts[-1]) > size:
        return None
    return order, size, ids


def _have_one_form(one: GroupedWeight, other: GroupedWeight) -> bool:
    """Whether one product can multiply both weights."""
    same_table = one.table is other.table or (
        one.table is not None and other.table is not None and torch.equal(one.table, other.table)
    )
    return (
        one.bits == other.bits
        and same_table
        and (one.zeros is None) == (other.zeros is None)
        and (one.mins is None) == (other.mins is None)
        and torch.equal(one.group_of, other.group_of)
    )


def _runs_of_one_form(parts: Sequence[GroupedWeight]) -> Iterator[list[GroupedWeight]]:
    run: list[GroupedWeight] = []
    for part in parts:
        if run and not _have_one_form(run[0], part):
            yield run
            run = []
        run.append(part)
    yield run


def _is_exact(table: Tensor) -> bool:
    """Whether bf16 holds every value of a table."""
    return torch.equal(table.bfloat16().float().nan_to_num(), table.nan_to_num())
