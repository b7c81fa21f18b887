"""Packed weights that are decoded some rows at a time, so that temporary copies stay small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardline.models.partition import Span
from shardline.runtime.loader.mapped_memory import mapped_empty
from shardline.weights.grouped import GroupedWeight, TwoLevels

_SLICE_ELEMENTS = 1 << 22
"""Elements that are decoded at once. Their copies fit a large cache, and the next slice uses their memory again."""
_PANEL_ROWS = 64
"""Slices begin at multiples of this number of rows: panels have as many, and words hold 8 rows at most."""
_FORM_ROWS = 8
"""Rows that are read to see the form of the others."""


@dataclass(frozen=True)
class RowSlices:
    """See `grouped.RowReader`."""

    read: Callable[[Span], GroupedWeight]
    """Decodes some rows."""
    rows: Span
    step: int
    """Rows of a slice."""

    def slices(self) -> Iterator[GroupedWeight]:
        for start in range(self.rows.start, self.rows.stop, self.step):
            yield self.read(Span(start, min(start + self.step, self.rows.stop)))

    def whole(self) -> GroupedWeight:
        whole, start = None, 0
        for part in self.slices():
            whole = whole or _like(part, self.rows.size, lambda shape, dtype: mapped_empty(shape, dtype))
            to = whole.select_rows(slice(start, start + len(part)))
            for own, theirs in zip(_row_tensors(to), _row_tensors(part), strict=True):
                own.copy_(theirs)
            start += len(part)
        assert whole is not None, "there are more rows than one slice has"
        return whole


def read_in_slices(read: Callable[[Span], GroupedWeight], rows: Span, num_columns: int) -> GroupedWeight:
    """`rows` of a weight of `num_columns` columns. `read` decodes some of them.

    If there are many, they are read when they are packed, unless zero points differ: their form depends on all of them.
    """
    step = max(1, _SLICE_ELEMENTS // max(1, num_columns) // _PANEL_ROWS) * _PANEL_ROWS
    if rows.size <= step:
        return read(rows)
    reader = RowSlices(read, rows, step)
    few = read(Span(rows.start, rows.start + _FORM_ROWS))
    if few.zeros is not None and few.shared_zero is None:
        return reader.whole()
    later = _like(few, rows.size, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    zeros = None if few.zeros is None else few.zeros[:1, :1].expand(rows.size, few.scales.shape[1])
    return replace(later, zeros=zeros, reader=reader)


def _like(
    weight: GroupedWeight, num_rows: int, empty: Callable[[tuple[int, int], torch.dtype], Tensor]
) -> GroupedWeight:
    """An uninitialised weight of the same form, with tensors that `empty` makes."""

    def like(part: Tensor) -> Tensor:
        return empty((num_rows, part.shape[1]), part.dtype)

    def levels(part: TwoLevels | None) -> TwoLevels | None:
        return None if part is None else TwoLevels(like(part.inner), like(part.outer))

    return replace(
        weight,
        values=like(weight.values),
        scales=like(weight.scales),
        zeros=None if weight.zeros is None else like(weight.zeros),
        mins=None if weight.mins is None else like(weight.mins),
        scale_levels=levels(weight.scale_levels),
        min_levels=levels(weight.min_levels),
    )


def _row_tensors(weight: GroupedWeight) -> list[Tensor]:
    """All tensors that have a row for each row of the weight."""
    parts = [weight.values, weight.scales, weight.zeros, weight.mins]
    levels = [part for pair in (weight.scale_levels, weight.min_levels) if pair is not None for part in pair]
    return [part for part in (*parts, *levels) if part is not None]
