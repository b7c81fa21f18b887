"""How a checkpoint stores a quantized weight: its tensors, their shapes, and what their numbers mean.

A weight is [rows, columns] = [out, in]. It is stored as one code per element and one scale per block of elements. Its
elements are (code - zero point) * scale, or table[code] * scale. `runtime/loader/stored.py` reads any part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from shardline.models.parts import Shape

SCALE_TYPES = ("F32", "F16", "BF16")
EXPONENT_TYPES = ("U8", "F8_E8M0")
"""Types of scales that are powers of two: a byte s stands for 2^(s - 127)."""

_TYPE_BITS = {"I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8}
_FLAT_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes of bitsandbytes."""
FLAT_NESTED_BLOCK = 256
"""Scales of bitsandbytes that share a scale, if scales are quantized too."""
_MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    file: Path
    dtype: str
    """The type's name in safetensors: F32, BF16, ..."""
    shape: Shape
    offset: int
    """Position of its first byte in the file."""
    num_bytes: int


Tensors: TypeAlias = Mapping[str, TensorEntry]
"""The tensors of a checkpoint, by key."""


class Codes(msgspec.Struct, frozen=True):
    """A tensor [rows, columns] of whole numbers of `bits`. A word of the file holds several neighbours."""

    part: str
    """The last part of the tensor's name."""
    type: str
    """Type of a word."""
    bits: int = 8
    along: Literal["rows", "columns"] = "columns"
    """The dim along which the numbers of a word are neighbours."""
    transposed: bool = False
    """Whether the file stores [columns, rows]."""
    order: tuple[int, ...] = ()
    """The neighbour in a word's lowest bits, in the next bits, and so on; empty: they are in order."""
    offset: int = 0
    """Number to add to a stored number."""
    block_columns: int = 0
    """The file stores [rows, blocks, words of a block], with so many columns in a block; 0: it has no such blocks."""

    @property
    def per_word(self) -> int:
        """Numbers in a word."""
        return _TYPE_BITS[self.type] // self.bits

    def shape(self, rows: int, columns: int) -> Shape:
        """The tensor's shape in the file, for `rows` x `columns` numbers."""
        if self.block_columns:
            return rows, -(-columns // self.block_columns), self.block_columns // self.per_word
        sizes = [rows, columns]
        packed = 0 if self.along == "rows" else 1
        sizes[packed] = -(-sizes[packed] // self.per_word)
        return tuple(sizes[::-1] if self.transposed else sizes)


class Scales(msgspec.Struct, frozen=True):
    """A tensor with the scale of each block."""

    part: str
    types: tuple[str, ...] = SCALE_TYPES
    block_rows: int = 1
    """Rows of a block; 0: all."""
    block_columns: int = 0
    """Columns of a block; 0: all."""
    transposed: bool = False
    """Whether the file stores the blocks as [columns, rows]."""
    whole_blocks: bool = False
    """Whether the weight must divide into blocks."""
    divisor: str = ""
    """The tensor with a number by which all scales are divided; empty: there is none."""
    multiplier: str = ""
    """The tensor with a number by which all scales are multiplied; empty: there is none."""
    factor: float = 1.0
    """Factor of all scales."""

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Numbers of blocks along both dims."""
        return -(-rows // (self.block_rows or rows)), -(-columns // (self.block_columns or columns))

    def num_groups(self, columns: int) -> int:
        """Blocks along a row."""
        return self.grid(1, columns)[1]


class Form(NamedTuple):
    """What a weight needs if it stays packed in memory."""

    bits: Literal[4, 6, 8]
    group_size: int
    """Columns that share a scale; 0: all."""
    group_bytes: float
    """Bytes of a group's scale and zero point."""
    has_zeros: bool
    """Whether codes are integers with zero points, in groups of neighbours."""
    scales: str = ""
    """The tensor of scales, if they take two more bytes in memory where it holds float32; empty: they do not."""


class BlockLayout(msgspec.Struct, frozen=True, tag=True):
    """One code per element, and one scale per block of rows and columns."""

    codes: Codes
    scales: Scales
    table: Literal["", "e4m3", "e2m1"] = ""
    """What codes stand for; empty: for themselves."""
    zeros: Codes | None = None
    """The zero points [rows, groups of columns]; None: all are `zero`."""
    zero: int = 0
    group_index: str = ""
    """The optional tensor [columns] with the group of each column; without it, groups are blocks of neighbours."""
    ordered: bool = True
    """Whether groups are blocks of neighbours in any case, so that the optional tensor must say this too."""
    weight_shape: str = ""
    """The tensor that states the weight's shape; empty: there is none."""
    quantizes_input: bool = False
    """See `GroupedWeight`."""
    input_bound: float = 0.0
    """See `GroupedWeight`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that must be there."""
        zeros = () if self.zeros is None else (self.zeros.part,)
        numbers = self.scales.divisor, self.scales.multiplier
        return tuple(filter(None, (self.codes.part, self.scales.part, *zeros, *numbers, self.weight_shape)))

    @property
    def form(self) -> Form:
        """The form in memory."""
        zero_bytes = 0 if self.zeros is None else 1
        scale_bytes = 2 if self.codes.bits == 4 and "F16" in self.scales.types else 4
        return Form(
            bits=4 if self.codes.bits == 4 else 8,
            group_size=self.scales.block_columns,
            group_bytes=scale_bytes + zero_bytes,
            has_zeros=not self.table and self.ordered,
            scales=self.scales.part if scale_bytes == 2 else "",
        )

    def is_there(self, base: str, tensors: Tensors) -> bool:
        """Whether the tensors whose names begin with `base` store a quantized weight."""
        entry = tensors.get(f"{base}{self.codes.part}")
        return entry is not None and (entry.dtype == self.codes.type or self.codes.part != "weight")

    def problems(self, base: str, rows: int, columns: int, experts: int, tensors: Tensors) -> list[str]:
        """What is wrong with the headers of a weight [rows, columns]; `experts`: how many are stacked, 0: it is not."""
        scales, stacked = self.scales, (experts,) * bool(experts)
        groups = scales.num_groups(columns)
        expected: list[tuple[str, Shape, tuple[str, ...]]] = [
            (self.codes.part, stacked + self.codes.shape(rows, columns), (self.codes.type,)),
        ]
        if self.zeros is not None:
            expected.append((self.zeros.part, stacked + self.zeros.shape(rows, groups), (self.zeros.type,)))
        if f"{base}{self.group_index}" in tensors and self.group_index:
            expected.append((self.group_index, (columns,), ("I32", "I64")))
        if self.weight_shape:
            expected.append((self.weight_shape, (2,), ("I64", "I32")))
        problems = []
        if scales.whole_blocks and scales.block_columns and columns % scales.block_columns:
            problems.append(
                f"{base}{self.codes.part} has {columns} columns, which are no multiple of {scales.block_columns}"
            )
        for part, shape, types in expected:
            problems += tensor_problems(f"{base}{part}", shape, types, tensors)
        grid = scales.grid(rows, columns)
        grid = grid[::-1] if scales.transposed else grid
        problems += tensor_problems(f"{base}{scales.part}", stacked + grid, scales.types, tensors, squeezed=True)
        for number in filter(None, (scales.divisor, scales.multiplier)):
            problems += tensor_problems(f"{base}{number}", (1,), SCALE_TYPES, tensors, squeezed=True)
        return problems


class FlatLayout(msgspec.Struct, frozen=True, tag=True):
    """bitsandbytes, 4 bits: two codes in a byte, the first in the high bits, and a scale for each block of neighbours.

    Blocks are those of the flattened weight. The checkpoint has the table of codes. Scales may be 8-bit codes in turn.
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that must be there."""
        return "weight", "weight.absmax", "weight.quant_map"

    @property
    def form(self) -> Form:
        """See `BlockLayout.form`."""
        return Form(bits=4, group_size=64, group_bytes=4, has_zeros=False)

    def is_there(self, base: str, tensors: Tensors) -> bool:
        """See `BlockLayout.is_there`."""
        return f"{base}weight" in tensors and f"{base}weight.absmax" in tensors

    def problems(self, base: str, rows: int, columns: int, experts: int, tensors: Tensors) -> list[str]:
        """See `BlockLayout.problems`."""
        if experts:
            return [f"{base}weight has stacked experts, which are not supported for bitsandbytes in 4 bits"]
        count = rows * columns
        problems = tensor_problems(f"{base}weight", (-(-count // 2), 1), ("U8",), tensors, squeezed=True)
        problems += tensor_problems(f"{base}weight.quant_map", (16,), ("F32",), tensors)
        problems += _state_problems(base, tensors)
        scales = tensors[f"{base}weight.absmax"]
        num_scales = math.prod(scales.shape)
        if scales.dtype not in ("F32", "U8"):
            problems.append(f"{base}weight.absmax has type {scales.dtype}; supported: F32, U8")
        if not any(-(-count // size) == num_scales for size in _FLAT_BLOCKS):
            problems.append(f"{base}weight.absmax has shape {list(scales.shape)}, which fits no block size")
        if scales.dtype == "U8":
            nested = -(-num_scales // FLAT_NESTED_BLOCK)
            problems += tensor_problems(f"{base}weight.nested_absmax", (nested,), ("F32",), tensors)
            problems += tensor_problems(f"{base}weight.nested_quant_map", (256,), ("F32",), tensors)
        return problems


class GGUFLayout(msgspec.Struct, frozen=True, tag=True):
    """GGUF: the file's own header says how each tensor is stored (`gguf/`). The form is that of one type."""

    bits: Literal[4, 6, 8]
    group_size: int
    group_bytes: float

    @property
    def form(self) -> Form:
        """See `BlockLayout.form`."""
        return Form(self.bits, self.group_size, self.group_bytes, has_zeros=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors that must be there: none by these names."""
        return ()

    def is_there(self, base: str, tensors: Tensors) -> bool:
        """See `BlockLayout.is_there`."""
        return False

    def problems(self, base: str, rows: int, columns: int, experts: int, tensors: Tensors) -> list[str]:
        """See `BlockLayout.problems`."""
        return []


Layout = BlockLayout | FlatLayout | GGUFLayout


class StoredModule(NamedTuple):
    """The quantized weight of one module of a checkpoint."""

    base: str
    """What the names of its tensors begin with."""
    layout: Layout
    rows: int
    columns: int


def state_key(base: str, tensors: Tensors) -> str | None:
    """The tensor with the JSON that describes a weight of bitsandbytes."""
    keys = (f"{base}weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    return next((key for key in keys if key in tensors), None)


def _state_problems(base: str, tensors: Tensors) -> list[str]:
    key = state_key(base, tensors)
    if key is None:
        return [f"{base}weight.quant_state.bitsandbytes__nf4 is missing"]
    entry = tensors[key]
    if entry.dtype != "U8" or entry.num_bytes > _MAX_STATE_BYTES:
        return [f"{key} is no text of at most {_MAX_STATE_BYTES} bytes"]
    return []


def tensor_problems(
    key: str, shape: Shape, types: tuple[str, ...], tensors: Tensors, *, squeezed: bool = False
) -> list[str]:
    """The problems of a tensor that should have `shape` and one of `types`; `squeezed`: dims of size 1 do not count."""
    entry = tensors.get(key)
    if entry is None:
        return [f"{key} is missing"]
    problems = []
    found, wanted = entry.shape, shape
    if squeezed:
        found, wanted = tuple(size for size in found if size != 1), tuple(size for size in wanted if size != 1)
    if found != wanted:
        problems.append(f"{key} has shape {list(entry.shape)}, not {list(shape)} ({entry.file.name})")
    if entry.dtype not in types:
        problems.append(f"{key} has type {entry.dtype}; supported: {', '.join(types)} ({entry.file.name})")
    return problems
