"""Packed weights that are decoded some rows at a time, so that temporary copies stay small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from shardline.models.partition import Span
from shardline.runtime.loader.mapped_memory import mapped_empty
from shardline.weights.grouped import GroupedWeight, TwoLevels

_SLICE_ELEMENTS = 1 << 21
"""Elements that are decoded at once. Their copies fit the caches, and memory that the allocator uses again."""


def read_in_slices(read: Callable[[Span], GroupedWeight], rows: Span, num_columns: int) -> GroupedWeight:
    """`rows` of a weight of `num_columns` columns. `read` decodes some of them."""
    step = max(8, _SLICE_ELEMENTS // max(1, num_columns) // 8 * 8)  # words hold up to 8 rows
    if rows.size <= step:
        return read(rows)
    whole: GroupedWeight | None = None
    for start in range(rows.start, rows.stop, step):
        some = Span(start, min(start + step, rows.stop))
        part = read(some)
        whole = whole or _empty_like(part, rows.size)
        to = whole.select_rows(slice(some.start - rows.start, some.stop - rows.start))
        for own, theirs in zip(_row_tensors(to), _row_tensors(part), strict=True):
            own.copy_(theirs)
    assert whole is not None, "there are more rows than one slice has"
    return whole


def _empty_like(weight: GroupedWeight, num_rows: int) -> GroupedWeight:
    """An uninitialised weight of the same form."""

    def empty(part: Tensor) -> Tensor:
        return mapped_empty((num_rows, part.shape[1]), part.dtype)

    def levels(part: TwoLevels | None) -> TwoLevels | None:
        return None if part is None else TwoLevels(empty(part.inner), empty(part.outer))

    return replace(
        weight,
        values=empty(weight.values),
        scales=empty(weight.scales),
        zeros=None if weight.zeros is None else empty(weight.zeros),
        mins=None if weight.mins is None else empty(weight.mins),
        scale_levels=levels(weight.scale_levels),
        min_levels=levels(weight.min_levels),
    )


def _row_tensors(weight: GroupedWeight) -> list[Tensor]:
    """All tensors that have a row for each row of the weight."""
    parts = [weight.values, weight.scales, weight.zeros, weight.mins]
    levels = [part for pair in (weight.scale_levels, weight.min_levels) if pair is not None for part in pair]
    return [part for part in (*parts, *levels) if part is not None]
