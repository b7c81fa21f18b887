"""Which packed weights the CPU's products multiply, and in which form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.weights.grouped import GroupedWeight

OCTET = 8
"""Neighbours along K that are packed together; a group of columns is a multiple of it."""
_LARGEST_ZERO = 16


class Groups(NamedTuple):
    """The groups of a weight's columns, as they are packed."""

    order: Tensor | None
    """[K]: the column in each packed place; None: columns are in order."""
    size: int
    """Columns of a group, a multiple of an octet; the last group may be smaller."""
    ids: Tensor
    """[G]: the group in each packed place."""


def regular_groups(group_of: Tensor) -> Groups | None:
    """The groups of columns [K]; None if they differ in size, or are no multiple of an octet."""
    is_sorted = bool((group_of[1:] >= group_of[:-1]).all())
    order = None if is_sorted else group_of.argsort(stable=True)
    counts = torch.bincount(group_of)
    ids = counts.nonzero()[:, 0]
    counts = counts[ids]
    if len(ids) == 1:
        return Groups(order, -(-len(group_of) // OCTET) * OCTET, ids)
    size = int(counts[0])
    if size % OCTET or bool((counts[:-1] != size).any()) or int(counts[-1]) > size:
        return None
    return Groups(order, size, ids)


def packed_groups(weight: GroupedWeight) -> Groups:
    """The groups of a weight that `can_multiply`."""
    groups = regular_groups(weight.group_of)
    assert groups is not None, "layers dequantize weights with other groups"
    return groups


E4M3_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of each byte in float8_e4m3fn."""


class Rounding(NamedTuple):
    """How x is rounded to e4m3; see `GroupedWeight.input_scale` and `input_bound`."""

    scale: float
    bound: float


def rounding_of(weight: GroupedWeight) -> Rounding | None:
    """How x is rounded for a weight; None: its values are not e4m3."""
    if not same_table(weight.table, E4M3_TABLE):
        return None
    return Rounding(weight.input_scale, weight.input_bound)


def have_one_form(one: GroupedWeight, other: GroupedWeight, rounds_x: bool = False) -> bool:
    """Whether one product can multiply both weights. `rounds_x`: whether it rounds x for e4m3 weights."""
    if rounds_x and rounding_of(one) != rounding_of(other):
        return False
    return (
        one.bits == other.bits
        and same_table(one.table, other.table)
        and (one.zeros is None) == (other.zeros is None)
        and (one.mins is None) == (other.mins is None)
        and (one.scale_levels is None) == (other.scale_levels is None)
        and torch.equal(one.group_of, other.group_of)
    )


def same_table(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tables, if any, have the same values."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def runs_of_one_form(parts: Sequence[GroupedWeight], rounds_x: bool) -> Iterator[list[GroupedWeight]]:
    """Neighbours of one form."""
    run: list[GroupedWeight] = []
    for part in parts:
        if run and not have_one_form(run[0], part, rounds_x):
            yield run
            run = []
        run.append(part)
    yield run


def _is_exact(table: Tensor) -> bool:
    """Whether bf16 holds every value of a table."""
    return torch.equal(table.bfloat16().float().nan_to_num(), table.nan_to_num())


def can_multiply(weight: GroupedWeight) -> bool:
    """Whether groups are regular, and bf16 holds the values of 8-bit codes."""
    is_exact = weight.bits == 4 or weight.table is None or _is_exact(weight.table)
    return is_exact and regular_groups(weight.group_of) is not None


def integer_table(bits: int, zeros: Sequence[Tensor]) -> Tensor | None:
    """The table of integer codes, if all groups share a zero point; None: they do not. Both ways are exact.

    Raises:
        ValueError: a zero point is too large for 4-bit codes.
    """
    # An expanded tensor holds one number.
    numbers = [(part[:1, :1] if part.untyped_storage().nbytes() == 1 else part).flatten() for part in zeros]
    used = torch.bincount(torch.cat(numbers)).nonzero()[:, 0].tolist() if zeros else [0]
    if bits == 4 and used and used[-1] > _LARGEST_ZERO:
        raise ValueError(f"a zero point of 4-bit codes is {used[-1]}, above {_LARGEST_ZERO}")
    if len(used) > 1:
        return None
    return torch.arange(1 << bits, dtype=torch.float32) - float(sum(used))
