"""The headers of a safetensors checkpoint. They are checked before anything is loaded, and need no torch.

A safetensors file starts with the size N of its header (8 bytes, little-endian). N bytes of JSON follow: for each
tensor its dtype, shape and data_offsets relative to byte 8 + N. The data comes last, without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.models.lookup import family
from shardline.models.packed_weights import NOT_PACKED, PACKED, PackedFormat
from shardline.models.parameters import Shape, parameters
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.models.wrapper import language_model_key

_ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_LOADABLE = ("F32", "BF16", "F16", "F64")
_SCALES = ("F16", "BF16", "F32")
_MAX_HEADER_BYTES = 100_000_000
_NAMED_PROBLEMS = 5
_WEIGHT_SUFFIXES = (".bin", ".safetensors", ".gguf", ".pth")


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


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by key. Those of a wrapped language model have its own keys."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read and validate the headers of the folder's safetensors files.

        Raises:
            ValueError: there are no files, one is missing, or one is corrupt or truncated. The message names the file.
        """
        files = weight_files(folder)
        tensors: dict[str, TensorEntry] = {}
        for file in files:
            for stored_key, entry in read_header(file).items():
                key = language_model_key(stored_key)
                if key in tensors:
                    raise ValueError(f"tensor {stored_key!r} is in {file} and in {tensors[key].file.name}")
                tensors[key] = entry
        return cls(folder, files, tensors)

    def has(self, key: str) -> bool:
        """Whether the checkpoint has a tensor `key`."""
        return key in self.tensors

    def shape(self, key: str) -> Shape:
        """Shape of tensor `key` in the file."""
        return self.tensors[key].shape

    def dtype(self, key: str) -> str:
        """Element type of tensor `key`, with its name in safetensors: F32, BF16, ..."""
        return self.tensors[key].dtype

    def find(self, source: TensorSource) -> str | None:
        """The key of `source`'s tensor in the checkpoint; None if the tensor is missing."""
        return next((key for key in (source.key, *source.aliases) if key in self.tensors), None)

    def find_packed(self, source: TensorSource) -> str | None:
        """The common prefix of the keys of `source`'s packed weight, last dot included; None if there is none."""
        bases = (key.removesuffix("weight") for key in (source.key, *source.aliases) if key.endswith(".weight"))
        return next((base for base in bases if f"{base}qweight" in self.tensors), None)

    def check(self, spec: DecoderSpec, packed: PackedFormat = NOT_PACKED) -> None:
        """Check that every parameter of `spec` exists, with the right shape and a type that can be loaded.

        Weights may be `packed`. Other tensors are ignored, except a bias that the spec does not have: if it were
        ignored, results would be wrong. (Packers write biases of zeros. The loader of packed weights checks these.)

        Raises:
            ValueError: there are problems. The message names the first few.
        """
        problems = []
        tensor_source = family(spec.model_type).tensor_source
        expected: dict[str, Shape] = {}
        expected_packed: dict[str, Shape] = {}
        for name, shape in parameters(spec):
            source = tensor_source(name, spec)
            key = self.find(source)
            if key is None and packed.is_packed and (base := self.find_packed(source)) is not None:
                if source.transposed:
                    problems.append(f"{base}qweight is packed, which is not supported for this model type")
                rows = shape[0] if source.rows is None else sum(source.rows)
                expected_packed[base] = max((rows, shape[1]), expected_packed.get(base, (0, 0)))
                continue
            if key is None:
                problems.append(f"{source.key} is missing")
                continue
            # If parameters share a tensor, the end of the last one gives the full size.
            stored = source.stored_shape(shape)
            expected[key] = max(stored, expected.get(key, stored))
        for base, shape in expected_packed.items():
            problems += self._packed_problems(base, shape, packed)
        for key, shape in expected.items():
            problems += self._problems(key, shape)
            bias = f"{key.removesuffix('weight')}bias"
            if bias in self.tensors and bias not in expected:
                problems.append(f"{bias} is there, but the configuration has no bias in that place")
        if problems:
            more = f"; and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
            raise ValueError(
                f"the weights in {self.folder} do not fit its config.json: "
                f"{'; '.join(dict.fromkeys(problems[:_NAMED_PROBLEMS]))}{more}"
            )

    def _problems(self, key: str, shape: Shape, types: tuple[str, ...] = _LOADABLE) -> list[str]:
        """The problems of a tensor that should have `shape` and one of `types`."""
        entry = self.tensors.get(key)
        if entry is None:
            return [f"{key} is missing"]
        problems = []
        if entry.shape != shape:
            problems.append(f"{key} has shape {list(entry.shape)}, not {list(shape)}")
        if entry.dtype not in types:
            problems.append(f"{key} has type {entry.dtype}; supported: {', '.join(types)}")
        return problems

    def _packed_problems(self, base: str, shape: Shape, packed: PackedFormat) -> list[str]:
        """The problems of a packed weight's tensors. The weight should have `shape`."""
        if any(size % PACKED for size in shape):
            return [f"{base}qweight stands for a weight {list(shape)}, whose sizes are not multiples of {PACKED}"]
        problems = []
        for part, part_shape in packed.shapes(*shape).items():
            problems += self._problems(f"{base}{part}", part_shape, _SCALES if part == "scales" else ("I32",))
        return problems


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint: model.safetensors, or those that its index names.

    Raises:
        ValueError: there are no files, the index is corrupt, or files that it names are missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _WEIGHT_SUFFIXES)
        found = f"found only {', '.join(others[:3])}" if others else "found no weights at all"
        raise ValueError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json ({found}); convert the weights "
            "to safetensors (in transformers: model.save_pretrained(folder)), or use load_format dummy"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        files = tuple(folder / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is corrupt: it must be an object with a weight_map of key to file name") from None
    outside = [name for name in names if Path(name).name != name]
    if outside or not files:
        raise ValueError(f"{index} is corrupt: its weight_map must name files beside it, got {outside or 'none'}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        named = ", ".join(missing[:_NAMED_PROBLEMS]) + (", ..." if len(missing) > _NAMED_PROBLEMS else "")
        raise ValueError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {named}; download it again")
    return files


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file.

    Raises:
        ValueError: the file is corrupt or truncated.
    """
    try:
        return _parse_header(file)
    except _CorruptError as error:
        raise ValueError(f"{file} is corrupt or truncated ({error}); download it again") from None


class _CorruptError(Exception):
    """A safetensors file is corrupt. The message says how."""


def _parse_header(file: Path) -> dict[str, TensorEntry]:
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise _CorruptError(f"{file_size} bytes, too short for a header")
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > min(file_size - 8, _MAX_HEADER_BYTES):
            raise _CorruptError(f"header of {header_size} bytes in a file of {file_size}")
        text = stream.read(header_size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _CorruptError("header is not JSON") from None
    if not isinstance(header, dict):
        raise _CorruptError("header is not a JSON object")
    header.pop("__metadata__", None)
    spans: list[tuple[int, int]] = []
    entries: dict[str, TensorEntry] = {}
    for key, value in header.items():
        dtype, shape, start, stop = _parse_entry(key, value)
        spans.append((start, stop))
        entries[key] = TensorEntry(file, dtype, shape, 8 + header_size + start, stop - start)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise _CorruptError(f"data of one tensor starts at byte {start} where another ends at {end}")
        end = stop
    if end != file_size - 8 - header_size:
        raise _CorruptError(f"{file_size - 8 - header_size} bytes of data where the header counts {end}")
    return entries


def _parse_entry(key: str, value: Any) -> tuple[str, Shape, int, int]:
    """(dtype, shape, start, stop) of a tensor. They are checked against each other."""
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [start, stop, *shape]
    except (KeyError, TypeError, ValueError):
        raise _CorruptError(f"entry of {key!r} is malformed") from None
    if not isinstance(dtype, str) or dtype not in _ELEMENT_BYTES:
        raise _CorruptError(f"{key!r} has unknown type {dtype!r}")
    if any(not isinstance(number, int) or number < 0 for number in numbers):
        raise _CorruptError(f"entry of {key!r} is malformed")
    if stop - start != math.prod(shape) * _ELEMENT_BYTES[dtype]:
        raise _CorruptError(f"{key!r} has {stop - start} bytes for shape {shape} of {dtype}")
    return dtype, tuple(shape), start, stop
