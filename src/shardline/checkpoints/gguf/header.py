"""The header of a GGUF file: metadata, and the types, shapes and places of tensors.

A file starts with "GGUF", a version (uint32), the number of tensors and the number of metadata entries (uint64 each).
The metadata follows, then the list of tensors. The data begins at the next multiple of the alignment. Numbers are
little-endian. A string is its length in bytes (uint64) and UTF-8. Versions 2 and 3 have this layout.

The reader of the `gguf` package trusts what a file says of its lengths, and takes 8 s for a vocabulary of 150,000.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardline.checkpoints.folder_files import not_itself
from shardline.models.parts import Shape

_MAX_HEADER_BYTES = 1 << 28
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_read_length = struct.Struct("<Q").unpack_from
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class BlockType(NamedTuple):
    """A tensor type: neighbours along a row form blocks."""

    name: str
    block_elements: int
    block_bytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
"""By the number that the file has for it."""

PLAIN_TYPES = ("F32", "F16", "BF16")
PACKED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
LOADABLE_TYPES = (*PLAIN_TYPES, *PACKED_TYPES)


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file."""

    file: Path
    type: BlockType
    shape: Shape
    """In the usual order; the file lists the last dim first."""
    offset: int
    """Position of its first byte in the file."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row. A row is a number of whole blocks."""
        return self.shape[-1] // self.type.block_elements * self.type.block_bytes


@dataclass(frozen=True)
class GGUFArray:
    """An array of the metadata, which is not read before it is needed."""

    type: int
    count: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The checked header of one file."""

    file: Path
    metadata: Mapping[str, Any]
    """Numbers, strings, booleans and `GGUFArray`s."""
    tensors: Mapping[str, GGUFTensor]

    def error(self, key: str, problem: str) -> ValueError:
        """A ValueError about an entry of the metadata, for the caller to raise."""
        return ValueError(f"{self.file}: {key} {problem}")

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty if it is missing.

        Raises:
            ValueError: it is something else, or no UTF-8.
        """
        array = self._array(key)
        if array is None:
            return []
        if array.type != _STRING:
            raise self.error(key, "must be an array of strings")
        data, position, found = self._bytes(array), 0, []
        try:
            for _ in range(array.count):
                start = position + 8
                position = start + _read_length(data, position)[0]
                found.append(data[start:position].decode())
        except UnicodeDecodeError:
            raise self.error(key, f"has an entry that is no UTF-8 (entry {len(found)})") from None
        return found

    def numbers(self, key: str) -> NDArray[Any] | None:
        """An array of numbers; None if it is missing.

        Raises:
            ValueError: it is something else.
        """
        array = self._array(key)
        if array is None:
            return None
        if array.type == _STRING:
            raise self.error(key, "must be an array of numbers")
        return np.frombuffer(self._bytes(array), dtype=np.dtype(f"<{_SCALARS[array.type]}"), count=array.count)

    def _array(self, key: str) -> GGUFArray | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, GGUFArray):
            raise self.error(key, "must be an array")
        return value

    def _bytes(self, array: GGUFArray) -> bytes:
        with self.file.open("rb") as stream:
            stream.seek(array.offset)
            data = stream.read(array.num_bytes)
        if len(data) != array.num_bytes:
            raise ValueError(f"{self.file} has changed since its header was read; start again")
        return data


def read_header(file: Path) -> GGUFHeader:
    """The header of a GGUF file. Results are kept as long as the file does not change.

    Raises:
        ValueError: the file is corrupt, truncated or of an unsupported version.
    """
    status = file.stat()
    return _read_header(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read_header(file: Path, size: int, _changed: int) -> GGUFHeader:
    try:
        if size < 24:
            raise _CorruptError(f"{size} bytes, too short for a header")
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), min(size, _MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data,
        ):
            return _Parser(file, size, data).parse()
    except _CorruptError as error:
        problem = not_itself(file) or str(error)
        raise ValueError(f"{file} is corrupt or truncated ({problem}); download it again") from None


class _CorruptError(Exception):
    """A file is corrupt. The message says how."""


class _Parser:
    """Reads a header from front to back. Every length is compared with what is left of the file before it is used."""

    def __init__(self, file: Path, size: int, data: mmap.mmap) -> None:
        self._file = file
        self._size = size
        self._data = data
        self._position = 0

    def parse(self) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise _CorruptError("it does not begin with GGUF")
        (version,) = self._unpack("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise ValueError(
                f"{self._file} is a GGUF file of {kind}, which is not supported; convert the model again with a "
                "current llama.cpp (versions 2 and 3, little-endian)"
            )
        num_tensors, num_entries = self._unpack("QQ")
        # An entry has at least a key's length, a type and a byte; a tensor a name's length, a dim, a type, an offset.
        self._check_count("metadata entries", num_entries, 13, _MAX_ENTRIES)
        self._check_count("tensors", num_tensors, 32, _MAX_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key")
            if key in metadata:
                raise _CorruptError(f"{key} is there twice")
            metadata[key] = self._value(key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _CorruptError(f"general.alignment must be a power of 2, got {alignment!r:.40}")
        described = [self._tensor() for _ in range(num_tensors)]
        begin = -(-self._position // alignment) * alignment
        return GGUFHeader(self._file, metadata, self._place(described, begin, alignment))

    def _place(
        self, described: list[tuple[str, BlockType, Shape, int]], begin: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """The tensors by name, with their places in the file; none may overlap or go beyond its end."""
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in described:
            if name in tensors:
                raise _CorruptError(f"tensor {name} is there twice")
            if offset % alignment:
                raise _CorruptError(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
            num_bytes = math.prod(shape) // kind.block_elements * kind.block_bytes
            if begin + offset + num_bytes > self._size:
                end = begin + offset + num_bytes
                raise _CorruptError(f"tensor {name} ends at byte {end}, and the file has {self._size}")
            tensors[name] = GGUFTensor(self._file, kind, shape, begin + offset, num_bytes)
        end, last = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise _CorruptError(f"tensors {last} and {name} overlap")
            end, last = tensor.offset + tensor.num_bytes, name
        return tensors

    def _tensor(self) -> tuple[str, BlockType, Shape, int]:
        """(name, type, shape, offset) of the next tensor in the list."""
        name = self._string("a tensor's name")
        (num_dims,) = self._unpack("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise _CorruptError(f"tensor {name} has {num_dims} dims")
        dims = self._unpack("Q" * num_dims)
        number, offset = self._unpack("IQ")
        if number not in BLOCK_TYPES:
            raise ValueError(
                f"{self._file}: tensor {name} has type {number}, which is unknown; supported: "
                f"{', '.join(LOADABLE_TYPES)}"
            )
        kind = BLOCK_TYPES[number]
        if min(dims) < 1 or math.prod(dims) > 8 * self._size:
            raise _CorruptError(f"tensor {name} has shape {list(dims[::-1])}")
        if dims[0] % kind.block_elements:
            raise _CorruptError(
                f"tensor {name} has rows of {dims[0]} elements, no multiple of {kind.name}'s {kind.block_elements}"
            )
        return name, kind, tuple(dims[::-1]), offset

    def _value(self, key: str) -> Any:
        (kind,) = self._unpack("I")
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise _CorruptError(f"{key} has unknown type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _array(self, key: str) -> GGUFArray:
        kind, count = self._unpack("IQ")
        if kind == _ARRAY:
            raise _CorruptError(f"{key} is an array of arrays")
        if kind != _STRING and kind not in _SCALARS:
            raise _CorruptError(f"{key} is an array of unknown type {kind}")
        size = 8 if kind == _STRING else struct.calcsize(f"<{_SCALARS[kind]}")
        if count > self._left // size:
            raise _CorruptError(f"{key} has {count} entries, more than fit")
        begin = self._position
        if kind == _STRING:
            self._skip_strings(key, count)
        else:
            self._position += count * size
        return GGUFArray(kind, count, begin, self._position - begin)

    def _skip_strings(self, key: str, count: int) -> None:
        data, position, end = self._data, self._position, len(self._data)
        for _ in range(count):
            if position + 8 > end:
                raise _CorruptError(f"{key} goes beyond the end")
            position += 8 + _read_length(data, position)[0]
        if position > end:
            raise _CorruptError(f"{key} goes beyond the end")
        self._position = position

    def _string(self, what: str) -> str:
        (size,) = self._unpack("Q")
        try:
            return self._take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise _CorruptError(f"{what} is no UTF-8") from None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise _CorruptError(f"{size} bytes at {self._position} in a header of at most {len(self._data)}")
        self._position += size
        return self._data[self._position - size : self._position]

    def _check_count(self, what: str, count: int, least_bytes: int, most: int) -> None:
        if count > min(self._left // least_bytes, most):
            raise _CorruptError(f"{count} {what}, more than fit")

    @property
    def _left(self) -> int:
        return len(self._data) - self._position


_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def special_ids(header: GGUFHeader) -> dict[str, int]:
    """The ids of bos_token, eos_token, unk_token and pad_token, as far as the file names them.

    Raises:
        ValueError: an entry is no id.
    """
    found = {name: token_id(header, key) for name, key in _IDS.items()}
    return {name: number for name, number in found.items() if number is not None}


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """The ids that the file names as the end of a text, of a turn and of a message.

    Raises:
        ValueError: an entry is no id.
    """
    found = (token_id(header, key) for key in _ENDS)
    return tuple(dict.fromkeys(number for number in found if number is not None))


def token_id(header: GGUFHeader, key: str) -> int | None:
    """The id in tokenizer.ggml.`key`; None: it is missing.

    Raises:
        ValueError: it is no id.
    """
    full = f"tokenizer.ggml.{key}"
    value = header.metadata.get(full)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise header.error(full, f"must be the id of a token, got {value!r:.40}")
    # Old files say "none" like this.
    return None if value == 0xFFFFFFFF else value
