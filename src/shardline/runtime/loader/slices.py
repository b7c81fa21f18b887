"""Packed weights that are decoded some rows at a time, so that temporary copies stay small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardline.kernels.memory import mapped_empty
from shardline.models.partition import Span
from shardline.weights.grouped import GroupedWeight, StoredRows, TwoLevels

_SLICE_ELEMENTS = 1 << 22
"""Elements that are decoded at once. Their copies fit a large cache, and the next slice uses their memory again."""
_PANEL_ROWS = 64
"""Slices begin at multiples of this number of rows: panels have as many, and words hold 8 rows at most."""
_STORED_BYTES = 8 << 20
"""Bytes of blocks that are packed at once. The mapped pages of a file count as this process's memory."""
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
    read_stored: Callable[[Span], StoredRows] | None = None
    """Returns some rows as the file stores them."""

    def slices(self) -> Iterator[GroupedWeight]:
        for start in range(self.rows.start, self.rows.stop, self.step):
            yield self.read(Span(start, min(start + self.step, self.rows.stop)))

    def stored_slices(self) -> Iterator[StoredRows] | None:
        return None if self.read_stored is None else self._read_stored_slices(self.read_stored)

    def _read_stored_slices(self, read: Callable[[Span], StoredRows]) -> Iterator[StoredRows]:
        row_bytes = read(Span(self.rows.start, self.rows.start + 1)).blocks.shape[1]
        step = _rows_of_slice(_STORED_BYTES, row_bytes)
        for start in range(self.rows.start, self.rows.stop, step):
            yield read(Span(start, min(start + step, self.rows.stop)))

    def whole(self) -> GroupedWeight:
        whole, start = None, 0
        for part in self.slices():
            whole = whole or _like(part, self.rows.size, lambda shape, dtype: mapped_empty(shape, dtype))
            to = whole.select_rows(slice(start, start + len(part)))
            for own, theirs in zip(_row_tensors(to), _row_tensors(part), strict=True):
                own.copy_(theirs)
            start += len(part)
        assert whole is not None, "there are rows"
        return whole


def read_in_slices(
    read: Callable[[Span], GroupedWeight],
    rows: Span,
    num_columns: int,
    read_stored: Callable[[Span], StoredRows] | None = None,
    read_zeros: Callable[[], Tensor | None] | None = None,
) -> GroupedWeight:
    """`rows` of a weight of `num_columns` columns. `read` decodes some of them, and `read_stored`, if given, returns
    them as the file stores them. `read_zeros` returns the zero points of all rows, if they may differ.

    Rows are read when they are packed if they are many or `read_stored` is given. Zero points are read now, since the
    form of the weight depends on them.
    """
    step = _rows_of_slice(_SLICE_ELEMENTS, num_columns)
    if rows.size <= (step if read_stored is None else _FORM_ROWS):
        return read(rows)
    few = read(Span(rows.start, rows.start + _FORM_ROWS))
    later = _like(few, rows.size, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    zeros = few.zeros
    if zeros is not None and few.shared_zero is not None:
        zeros = zeros[:1, :1].expand(rows.size, few.scales.shape[1])
    elif zeros is not None:
        assert read_zeros is not None, "zero points may differ"
        zeros = read_zeros()
    return replace(later, zeros=zeros, reader=RowSlices(read, rows, step, read_stored))


def _rows_of_slice(size: int, row_size: int) -> int:
    """How many rows a slice of `size` has, in whole panels."""
    return max(1, size // max(1, row_size) // _PANEL_ROWS) * _PANEL_ROWS


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
