"""The formats in which linear weights are held in memory, and the bytes that a weight takes in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


class WeightFormat(msgspec.Struct, frozen=True):
    """How the linear weights of a model are held."""

    name: str
    """A key of FORMATS, or "plain": in the activations' dtype."""
    group_size: int = 0
    """Neighbours along the input dim that share a scale; 0: the whole row, or there are no scales."""

    @property
    def is_plain(self) -> bool:
        """Whether weights are held in the activations' dtype."""
        return self.name == "plain"


PLAIN = WeightFormat("plain")


@dataclass(frozen=True)
class FormatSizes:
    """Bits of a value, bytes of the scales beside it, and which weights a format covers."""

    bits: int
    row_bytes: int = 4
    """Bytes of a row's scale."""
    group_bytes: int = 0
    """Bytes that each group of a row has for itself."""
    group_size: int = 0
    """Group size where the checkpoint does not set it."""
    lm_head: str = ""
    """Name of the format of the output embedding; empty: the same."""
    layers_only: bool = False
    """Whether the output embedding and experts are held in the activations' dtype."""


FORMATS: Mapping[str, FormatSizes] = {
    "int8": FormatSizes(bits=8),
    "int4": FormatSizes(bits=4, group_size=32, group_bytes=1, lm_head="int8"),
    "fp8": FormatSizes(bits=8, lm_head="int8"),
    # A group has a scale in float16, as packers write it, and a zero point.
    "w4a16": FormatSizes(bits=4, row_bytes=0, group_size=128, group_bytes=3, layers_only=True),
}


def weight_format(name: str) -> WeightFormat:
    """The format of that name, with the group size that it has by itself."""
    return PLAIN if name == PLAIN.name else WeightFormat(name, FORMATS[name].group_size)


def held_format(chosen: WeightFormat, *, lm_head: bool = False, expert: bool = False) -> WeightFormat:
    """The format of one linear weight in a model that is held in `chosen`: of the lm_head, an expert or another."""
    if chosen.is_plain:
        return chosen
    sizes = FORMATS[chosen.name]
    if sizes.layers_only and (lm_head or expert):
        return PLAIN
    return weight_format(sizes.lm_head) if lm_head and sizes.lm_head else chosen


def format_bytes(held: WeightFormat, rows: int, columns: int) -> int:
    """Bytes of a weight [rows, columns] in a format that is not plain, without padding."""
    sizes = FORMATS[held.name]
    groups = -(-columns // held.group_size) if held.group_size else 1
    return rows * (columns * sizes.bits // 8 + groups * sizes.group_bytes + sizes.row_bytes)
