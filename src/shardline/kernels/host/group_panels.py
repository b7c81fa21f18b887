"""Fills the panels of a packed weight, some rows at a time: codes, and the scales, mins and zero points of groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.grouped_forms import Groups
from shardline.kernels.host.memory import streamed_empty
from shardline.kernels.host.panels import PANEL_COLUMNS
from shardline.weights.grouped import GroupedWeight, StoredRows, TwoLevels, scales_not_finite

_OUTER_BYTES = 2 * PANEL_COLUMNS
"""Bytes of the outer numbers of a panel's columns, in float16."""


class GroupNumbers(NamedTuple):
    """The numbers of the groups of a packed weight. [num_panels, G, 64] each, or two levels in bytes: for each outer
    group, [num_panels, outer groups, bytes] int8, the outer numbers of 64 columns in float16, then the inner numbers of
    each of its groups."""

    scales: Tensor
    mins: Tensor | None
    zeros: Tensor | None


def numbers_empty(
    parts: Sequence[GroupedWeight], leading: tuple[int, ...], groups: Groups, *, has_zeros: bool
) -> GroupNumbers:
    """Memory for the numbers of weights of one form; `leading` ends with the number of panels."""
    first, num_groups = parts[0], len(groups.ids)

    def empty(dtype: torch.dtype, levels: TwoLevels | None = None) -> Tensor:
        if levels is None:
            return streamed_empty((*leading, num_groups, PANEL_COLUMNS), dtype)
        num_outer = levels.outer.shape[1]
        num_bytes = _OUTER_BYTES + num_groups // num_outer * PANEL_COLUMNS
        return streamed_empty((*leading, num_outer, num_bytes), torch.int8)

    kinds = {part.scales.dtype for part in parts}
    return GroupNumbers(
        scales=empty(kinds.pop() if len(kinds) == 1 else torch.float32, first.scale_levels),
        mins=None if first.mins is None else empty(torch.float32, first.min_levels),
        zeros=empty(torch.uint8) if has_zeros else None,
    )


def fill_panels(
    parts: Sequence[GroupedWeight], panels: Tensor, numbers: GroupNumbers, groups: Groups, gated: bool
) -> None:
    """Pack weights of one form, stacked, or the gate and up. Columns behind their last become zero."""
    for held in numbers:
        if held is not None and len(held):
            held[-1].zero_()
    start = 0
    for half, part in enumerate(parts):
        place = half if gated else None
        stored = part.in_stored_slices() if _holds_as_stored(part, numbers, groups) else None
        if stored is not None:
            for rows in stored:
                _pack_stored(rows, panels, numbers, start, place)
                start += len(rows.blocks)
        else:
            for some in part.in_slices():
                codes = some.values if groups.order is None else _in_order(some.values, groups.order)
                panel, first = _first_place(start, place)
                _cpu.pack_codes(codes, panels[panel:], first, place)
                for run in _runs(start, len(some), place):
                    _fill_run(some, numbers, groups.ids, run)
                start += len(some)
        start = 0 if gated else start


def _in_order(codes: Tensor, order: Tensor) -> Tensor:
    found = torch.empty_like(codes)
    _cpu.gather_columns(codes, order.to(torch.int32), found)
    return found


def _holds_as_stored(part: GroupedWeight, numbers: GroupNumbers, groups: Groups) -> bool:
    """Whether `numbers` have the types of the file. Parts with unlike types share wider ones."""
    plain = part.scale_levels is None
    return groups.order is None and numbers.zeros is None and (not plain or numbers.scales.dtype == part.scales.dtype)


def _pack_stored(rows: StoredRows, panels: Tensor, numbers: GroupNumbers, start: int, half: int | None) -> None:
    """Pack rows from row `start` of a weight on.

    Raises:
        ValueError: scales are not finite.
    """
    panel, first = _first_place(start, half)
    mins = None if numbers.mins is None else numbers.mins[panel:]
    if not _cpu.pack_blocks(rows.blocks, rows.kind, panels[panel:], numbers.scales[panel:], mins, first, half):
        raise scales_not_finite(rows.name)


def _first_place(start: int, half: int | None) -> tuple[int, int]:
    """The panel of row `start` of a weight, and the column in it where packing begins."""
    if half is None:
        return divmod(start, PANEL_COLUMNS)
    assert start % (PANEL_COLUMNS // 2) == 0, "slices begin with a panel"
    return start // (PANEL_COLUMNS // 2), 0


def rows_of_panels(part: Tensor, panels: Tensor, columns: Tensor) -> Tensor:
    """[R, G]: the scales, mins or zeros of rows; levels are multiplied."""
    if part.dtype != torch.int8:
        return part[panels, :, columns]
    levels, row = part[panels], torch.arange(len(panels))
    outer = levels[..., :_OUTER_BYTES].contiguous().view(torch.float16)[row, :, columns]
    inner = levels[..., _OUTER_BYTES:].reshape(*levels.shape[:2], -1, PANEL_COLUMNS)[row, :, :, columns]
    return TwoLevels(inner.flatten(1), outer).multiply()


class _Run(NamedTuple):
    """Neighbouring rows that fill the same columns of neighbouring panels."""

    rows: slice
    panels: slice
    columns: slice


def _runs(start: int, count: int, half: int | None) -> Iterator[_Run]:
    """Where `count` rows go, from row `start` of a weight: the rest of a panel, whole panels, the begin of a panel."""
    width = PANEL_COLUMNS if half is None else PANEL_COLUMNS // 2
    begin, done = 0 if half is None else half * width, 0
    while done < count:
        panel, column = divmod(start + done, width)
        num_panels = max(1, (count - done) // width) if column == 0 else 1
        size = min(count - done, num_panels * width - column)
        columns = slice(begin + column, begin + min(width, column + size))
        yield _Run(slice(done, done + size), slice(panel, panel + num_panels), columns)
        done += size


def _fill_run(weight: GroupedWeight, numbers: GroupNumbers, ids: Tensor, run: _Run) -> None:
    num_panels = run.panels.stop - run.panels.start
    pairs = ((numbers.scales, weight.scale_levels, weight.scales), (numbers.mins, weight.min_levels, weight.mins))
    for to, levels, plain in (*pairs, (numbers.zeros, None, weight.zeros)):
        if to is None:
            continue
        panels = to[run.panels]
        if levels is None:
            assert plain is not None, "weights of one form have the same numbers"
            rows = plain[run.rows][:, ids]
            panels[:, :, run.columns] = rows.view(num_panels, -1, len(ids)).transpose(1, 2)
            continue
        num_outer = panels.shape[1]
        outer = panels[..., :_OUTER_BYTES].view(torch.float16)
        inner = panels[..., _OUTER_BYTES:].view(num_panels, num_outer, -1, PANEL_COLUMNS)
        outer[:, :, run.columns] = levels.outer[run.rows].reshape(num_panels, -1, num_outer).transpose(1, 2)
        own_inner = levels.inner[run.rows].reshape(num_panels, -1, num_outer, inner.shape[2])
        inner[:, :, :, run.columns] = own_inner.permute(0, 2, 3, 1)
