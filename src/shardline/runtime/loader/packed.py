"""Reads any part of a weight that a GPTQ or AWQ checkpoint has packed in 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardline.models.packed_weights import PACKED, PackedFormat
from shardline.models.partition import Span
from shardline.weights.grouped import GroupedWeight

_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order of eight neighbours in a word: the element in the lowest four bits, in the next four bits, and so on."""


def read_packed(part: Callable[[str], Tensor], form: PackedFormat, rows: Span, columns: Span) -> GroupedWeight:
    """Read a part of a weight; `part` returns qweight, qzeros or scales as the checkpoint stores it."""
    if rows.size == 0:
        nothing = torch.empty(0, columns.size, dtype=torch.uint8)
        group_of = torch.zeros(columns.size, dtype=torch.int64)
        return GroupedWeight(nothing, nothing[:, :1].float(), group_of, zeros=nothing[:, :1], label=form.method)
    order = _IN_ORDER if form.method == "gptq" else _AWQ_ORDER
    if form.method == "gptq":
        words, before = _words(columns)
        packed = part("qweight")[words.start : words.stop, rows.start : rows.stop].T
        values = unpacked(packed, order)[:, before : before + columns.size]
    else:
        words, before = _words(rows)
        packed = part("qweight")[columns.start : columns.stop, words.start : words.stop]
        values = unpacked(packed, order)[:, before : before + rows.size].T
    group_size = form.group_size or columns.stop
    group_of = torch.arange(columns.start, columns.stop) // group_size
    groups = slice(int(group_of[0]), int(group_of[-1]) + 1)
    words, before = _words(rows)
    zeros = unpacked(part("qzeros")[groups, words.start : words.stop], order)[:, before : before + rows.size]
    scales = part("scales")[groups, rows.start : rows.stop]
    return GroupedWeight(
        values=values.contiguous(),
        scales=scales.T.contiguous(),
        zeros=(zeros.T + form.zero_offset).contiguous(),
        group_of=group_of - groups.start,
        label=form.method,
    )


def unpacked(words: Tensor, order: Sequence[int]) -> Tensor:
    """[..., W] int32 -> [..., 8 W] uint8: the i-th four bits of a word, lowest first, are its element order[i]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    places = torch.tensor(order).argsort()
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)[..., places].flatten(-2)


def _words(span: Span) -> tuple[Span, int]:
    """The words that hold the numbers of `span`, and how many other numbers come before them in the first word."""
    first = span.start // PACKED
    return Span(first, -(-span.stop // PACKED)), span.start - first * PACKED
