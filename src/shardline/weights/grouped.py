"""Weights of at most 8 bits whose columns share scales in groups: what every packed file format decodes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


CodeBits = Literal[4, 6, 8]
"""Bits that a code may take in memory. Codes of 5 bits take 6."""


class TwoLevels(NamedTuple):
    """Scales or mins [N, G] that are products of a small integer and a number which some neighbouring groups share. The
    products are exact in float32."""

    inner: Tensor
    """[N, G] int8"""
    outer: Tensor
    """[N, G / n] float16, with n a power of two"""

    def multiply(self) -> Tensor:
        """[N, G] float32."""
        size = self.inner.shape[1] // max(1, self.outer.shape[1])
        return (self.inner.float().view(*self.outer.shape, size) * self.outer.float()[..., None]).flatten(1)

    def select_rows(self, rows: slice) -> TwoLevels:
        """Views of some of the rows."""
        return TwoLevels(self.inner[rows], self.outer[rows])


class StoredRows(NamedTuple):
    """Rows of a weight as a GGUF file stores them, in whole blocks."""

    blocks: Tensor
    """[N, bytes] uint8; rows may be strided"""
    kind: int
    """The number that GGUF has for the type of the blocks."""
    name: str
    """The file and the tensor, for errors."""


def scales_not_finite(name: str) -> ValueError:
    """The error for a weight of a damaged file; `name` says which."""
    return ValueError(f"{name} has scales that are NaN or infinite; download the file again")


class RowReader(Protocol):
    """Reads the rows of a weight when they are packed."""

    def slices(self) -> Iterator[GroupedWeight]:
        """All rows in order, some at a time."""

    def stored_slices(self) -> Iterator[StoredRows] | None:
        """The same rows as the file stores them; None: they must be decoded."""

    def whole(self) -> GroupedWeight:
        """All rows."""


@dataclass(frozen=True)
class GroupedWeight:
    """K columns of N rows of a packed weight. The element of row n and column k, in group g = group_of[k], is

        value(values[n, k]) * scales[n, g] - mins[n, g]

    where value(c) is table[c] if there is a table, and otherwise c - zeros[n, g]. Without mins, nothing is subtracted.
    Columns are in the order of the model's input features, and their groups may be in any order.
    """

    values: Tensor
    """[N, K] uint8: codes, below 2^bits"""
    scales: Tensor
    """[N, G] float16, bfloat16 or float32, for the groups that these columns belong to; the product of all levels of
    scales"""
    group_of: Tensor
    """[K] int64: the group, of G, that each column belongs to"""
    zeros: Tensor | None = None
    """[N, G] uint8: the code that stands for zero; None: 0. Only without a table."""
    mins: Tensor | None = None
    """[N, G] float32"""
    table: Tensor | None = None
    """[2^bits] float32: the value of each code; None: codes are unsigned integers."""
    bits: CodeBits = 4
    """Bits of a code when it is packed in memory."""
    label: str = ""
    """The name of the file's format, for logs."""
    scale_levels: TwoLevels | None = None
    """The scales again, as the file has them, if it has two levels of them. They take less memory."""
    min_levels: TwoLevels | None = None
    """The mins, in the same way."""
    quantizes_input: bool = False
    """Whether the file's format multiplies 8-bit integers: then x is quantized to them too, row by row."""
    input_scale: float = 0.0
    """The scale of x where products round x to e4m3; 0: each row, or each group of a row, has its own."""
    input_bound: float = 0.0
    """Larger |x| count as this number where rows of x have scales of their own; 0: no bound."""
    reader: RowReader | None = None
    """Reads the rows later. Then `values`, `scales`, `mins` and levels are on the meta device here, but not `zeros`."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shared_zero(self) -> int | None:
        """The zero point of all groups, if they share one number in memory."""
        if self.zeros is None or self.zeros.numel() == 0 or self.zeros.untyped_storage().nbytes() > 1:
            return None
        return int(self.zeros[0, 0])

    def in_slices(self) -> Iterator[GroupedWeight]:
        """The rows in order, some at a time, with their tensors."""
        if self.reader is None:
            yield self
        else:
            yield from self.reader.slices()

    def in_stored_slices(self) -> Iterator[StoredRows] | None:
        """See `RowReader.stored_slices`."""
        return None if self.reader is None else self.reader.stored_slices()

    def whole(self) -> GroupedWeight:
        """The weight with all of its tensors."""
        return self if self.reader is None else self.reader.whole()

    def to(self, device: torch.device) -> GroupedWeight:
        """A copy on `device`, without levels; the same object if it is there."""
        if self.group_of.device == device:
            return self
        if self.reader is not None:
            return self.whole().to(device)
        return replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            group_of=self.group_of.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            mins=None if self.mins is None else self.mins.to(device),
            table=None if self.table is None else self.table.to(device),
            scale_levels=None,
            min_levels=None,
        )

    def select_rows(self, rows: slice) -> GroupedWeight:
        """Views of some of the rows."""
        if self.reader is not None:
            return self.whole().select_rows(rows)
        return replace(
            self,
            values=self.values[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
            mins=None if self.mins is None else self.mins[rows],
            scale_levels=None if self.scale_levels is None else self.scale_levels.select_rows(rows),
            min_levels=None if self.min_levels is None else self.min_levels.select_rows(rows),
        )

    def decode(self) -> Tensor:
        """[N, K] float32: value(code) of each element, without scales and mins. It is exact."""
        if self.reader is not None:
            return self.whole().decode()
        if self.table is not None:
            # torch selects along a dim three times as fast as it indexes.
            return self.table.index_select(0, self.values.flatten().int()).view(self.values.shape)
        if self.zeros is None:
            return self.values.float()
        return (self.values.short() - self.zeros.short().index_select(1, self.group_of)).float()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]: product and difference are each rounded to float32, and the result to `dtype`. For integer codes and
        16-bit scales, the product is exact in float32."""
        if self.reader is not None:
            dense, start = self.values.new_empty(self.values.shape, dtype=dtype, device="cpu"), 0
            for part in self.in_slices():
                dense[start : start + len(part)] = part.dequantize(dtype)
                start += len(part)
            return dense
        dense = self.decode() * self.scales.float().index_select(1, self.group_of)
        if self.mins is not None:
            dense -= self.mins.index_select(1, self.group_of)
        return dense.to(dtype)
