"""The headers of a safetensors checkpoint. They are checked before anything is loaded, and need no torch.

A safetensors file starts with the size N of its header (8 bytes, little-endian). N bytes of JSON follow: for each
tensor its dtype, shape and data_offsets relative to byte 8 + N. The data comes last, without gaps.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from shardline.checkpoints.folder_files import not_itself, weight_files
from shardline.checkpoints.lookup import family
from shardline.checkpoints.wrapper import language_model_key, whole_model_keys
from shardline.models.parameters import expert_of, holds_whole_numbers, parameters, parse_name
from shardline.models.parts import Shape
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.models.stored_layout import StoredModule, TensorEntry, tensor_problems
from shardline.models.stored_weights import RuleBook, StoredRules

_ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_LOADABLE = ("F32", "BF16", "F16", "F64")
_WHOLE_NUMBERS = ("I64",)
_MAX_HEADER_BYTES = 1 << 25
"""The largest published headers, of a hundred thousand tensors, are half as long."""
_MAX_DIMS = 16
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_NAMED_PROBLEMS = 5
_PACKED_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB", "_blocks")
"""What tensors of quantized weights, and no others, have in the place of "weight"."""


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
        return cls(folder, files, whole_model_keys(tensors))

    def has(self, key: str) -> bool:
        """Whether the checkpoint has a tensor `key`."""
        return key in self.tensors

    def shape(self, key: str) -> Shape:
        """Shape of tensor `key` in the file."""
        return self.tensors[key].shape

    def dtype(self, key: str) -> str:
        """Element type of tensor `key`, with its name in safetensors: F32, BF16, ..."""
        return self.tensors[key].dtype

    def place(self, source: TensorSource) -> TensorSource:
        """The place of a parameter in this checkpoint: `source`, or its own tensors if they are apart."""
        if source.apart and source.apart.rpartition(".")[0] in self._modules:
            return TensorSource(source.apart)
        return source

    @functools.cached_property
    def _modules(self) -> frozenset[str]:
        """The names of all tensors without their last part."""
        return frozenset(key.rpartition(".")[0] for key in self.tensors)

    def find(self, source: TensorSource) -> str | None:
        """The key of `source`'s tensor in the checkpoint; None if the tensor is missing."""
        return next((key for key in (source.key, *source.aliases) if key in self.tensors), None)

    def check(self, spec: DecoderSpec, rules: StoredRules | None = None) -> dict[str, StoredModule]:
        """Check that every parameter of `spec` exists, with the right shape and a type that can be loaded.

        A weight is quantized if its quantized tensors are there and `rules`, the ones of config.json, cover its module.
        Other tensors are ignored, except a bias that the spec does not have: if it were ignored, results would be
        wrong. (GPTQ's and AWQ's packers write biases of zeros. The loader of quantized weights checks these.)

        Returns the quantized modules by what the names of their tensors begin with, last dot included.

        Raises:
            ValueError: there are problems. The message names the first few.
        """
        problems: list[str] = []
        wrong: list[str] = []
        tensor_source = family(spec.model_type).tensor_source
        quantized = _QuantizedModules(self, rules or StoredRules())
        expected: dict[str, Shape] = {}
        whole_numbers: set[str] = set()
        for name, shape in parameters(spec):
            source = self.place(tensor_source(name, spec))
            if quantized.add(name, source, shape, problems):
                continue
            key = self.find(source)
            if key is None:
                problems.append(f"{source.key} is missing")
                wrong.append(source.key)
                continue
            # If parameters share a tensor, the end of the last one gives the full size.
            stored = source.stored_shape(shape)
            expected[key] = max(stored, expected.get(key, stored))
            if holds_whole_numbers(name):
                whole_numbers.add(key)
        modules = quantized.finish(problems)
        for key, shape in expected.items():
            types = _WHOLE_NUMBERS if key in whole_numbers else _LOADABLE
            if found := tensor_problems(key, shape, types, self.tensors):
                problems += found
                wrong.append(key)
            bias = f"{key.removesuffix('weight')}bias"
            if bias in self.tensors and bias not in expected:
                problems.append(f"{bias} is there, but the configuration has no bias in that place")
        if problems:
            self._check_section(wrong, rules or StoredRules())
            problems = list(dict.fromkeys(problems))
            more = f"; and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
            raise ValueError(
                f"the weights in {self.folder} do not fit its config.json (download both again): "
                f"{'; '.join(problems[:_NAMED_PROBLEMS])}{more}"
            )
        return modules

    def _check_section(self, wrong: Iterable[str], rules: StoredRules) -> None:
        """Say so if one of the weights `wrong`, which do not fit, is quantized in a way that config.json does not say.

        Raises:
            ValueError: it is.
        """
        own = {part for layout in rules.layouts for part in layout.parts}
        parts = [part for part in _PACKED_PARTS if part not in own]
        keys = (f"{key.removesuffix('weight')}{part}" for key in wrong for part in parts)
        if packed := next((key for key in keys if key in self.tensors), None):
            says = f"says that they are {rules}" if rules.is_packed else "has no quantization_config"
            raise ValueError(
                f"{self.tensors[packed].file} has quantized weights ({packed}), but {self.folder / 'config.json'} "
                f"{says}; download config.json again from where the weights come from"
            )


class _QuantizedModules:
    """Collects the quantized modules of a checkpoint, and checks their headers."""

    def __init__(self, checkpoint: Checkpoint, rules: StoredRules) -> None:
        self._tensors = checkpoint.tensors
        self._layouts = tuple(dict.fromkeys(rules.layouts))
        self._rules = rules
        self._book = RuleBook(rules)
        self._shapes: dict[str, tuple[int, int, int]] = {}
        self._is_expert: dict[str, bool] = {}

    def add(self, name: str, source: TensorSource, shape: Shape, problems: list[str]) -> bool:
        """Whether the parameter `name` is a quantized weight of the checkpoint."""
        if parse_name(name).kind != "weight" or len(shape) != 2:
            return False
        base = self._find(source)
        if base is None:
            return False
        # Packers store every linear as [out, in], also where the model's own checkpoint has [in, out].
        stacked, *sizes = (0, *replace(source, transposed=False, index=None).stored_shape(shape))
        if source.index is not None:
            stacked = source.index[1]
        # If parameters share a tensor, the end of the last one gives the full size.
        self._shapes[base] = max((sizes[0], sizes[1], stacked), self._shapes.get(base, (0, 0, 0)))
        self._is_expert[base] = expert_of(parse_name(name).part) is not None
        return True

    def _find(self, source: TensorSource) -> str | None:
        for key in (source.key, *source.aliases):
            base = key.removesuffix("weight") if key.endswith(".weight") else key
            if any(layout.is_there(base, self._tensors) for layout in self._layouts):
                return base
        return None

    def finish(self, problems: list[str]) -> dict[str, StoredModule]:
        """The modules found. Adds what is wrong with them to `problems`."""
        modules = {}
        for base, (rows, columns, stacked) in self._shapes.items():
            rule = self._book.find(base.removesuffix("."), self._is_expert[base])
            if rule is None:
                problems.append(f"{base}weight is quantized, but quantization_config leaves this module out")
                continue
            there = [layout for layout in rule.layouts if layout.is_there(base, self._tensors)]
            if not there:
                problems.append(f"{base}weight is quantized, but not as quantization_config says ({self._rules})")
                continue
            chosen, found = there[0], there[0].problems(base, rows, columns, stacked, self._tensors)
            for layout in there[1:] if found else ():
                others = layout.problems(base, rows, columns, stacked, self._tensors)
                if len(others) < len(found):
                    chosen, found = layout, others
            problems += found
            if f"{base}bias" in self._tensors:
                problems += tensor_problems(f"{base}bias", (rows,), _LOADABLE, self._tensors)
            modules[base] = StoredModule(base, chosen, rows, columns)
        return modules


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file.

    Raises:
        ValueError: the file is corrupt or truncated.
    """
    try:
        return _parse_header(file)
    except _CorruptError as error:
        problem = not_itself(file) or str(error)
        raise ValueError(f"{file} is corrupt or truncated ({problem}); download it again") from None


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
    # Values are decoded one by one into their types, so a header of nested lists takes no more memory than its text.
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise _CorruptError("header is not JSON: not a JSON object") from None
    except (ValueError, RecursionError):
        raise _CorruptError("header is not JSON") from None
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


class _Entry(msgspec.Struct):
    dtype: Any
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


def _parse_entry(key: str, value: msgspec.Raw) -> tuple[str, Shape, int, int]:
    """(dtype, shape, start, stop) of a tensor. They are checked against each other."""
    try:
        entry = msgspec.json.decode(value, type=_Entry)
    except (ValueError, RecursionError):
        raise _CorruptError(f"entry of {key!r} is malformed") from None
    dtype, shape, (start, stop) = entry.dtype, tuple(entry.shape), entry.data_offsets
    if not isinstance(dtype, str) or dtype not in _ELEMENT_BYTES:
        raise _CorruptError(f"{key!r} has unknown type {dtype!r:.80}")
    if stop - start != math.prod(shape) * _ELEMENT_BYTES[dtype]:
        raise _CorruptError(f"{key!r} has {stop - start} bytes for shape {list(shape)} of {dtype}")
    return dtype, shape, start, stop
