"""A safetensors checkpoint, checked before anything is loaded: headers only, no torch.

A safetensors file is: the header's size N (8 bytes, little-endian), N bytes of JSON (per tensor: dtype, shape and
data_offsets relative to byte 8 + N), then the data, without gaps.
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
from shardline.models.parameters import Shape, parameters
from shardline.models.spec import DecoderSpec, TensorSource

_ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_LOADABLE = ("F32", "BF16", "F16", "F64")
_MAX_HEADER_BYTES = 100_000_000
_NAMED_PROBLEMS = 5


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    file: Path
    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    shape: Shape
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by key."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read and validate the headers of the folder's safetensors files.

        Raises:
            ValueError: there are none, one is missing, or one is corrupt or truncated; names the file.
        """
        files = weight_files(folder)
        tensors: dict[str, TensorEntry] = {}
        for file in files:
            for key, entry in read_header(file).items():
                if key in tensors:
                    raise ValueError(f"{file} has tensor {key!r}, and so has {tensors[key].file.name}")
                tensors[key] = entry
        return cls(folder, files, tensors)

    def has(self, key: str) -> bool:
        """Whether there is a tensor of that name."""
        return key in self.tensors

    def shape(self, key: str) -> Shape:
        """Shape of tensor `key` as stored."""
        return self.tensors[key].shape

    def dtype(self, key: str) -> str:
        """Element type of tensor `key` as safetensors names it: F32, BF16, ..."""
        return self.tensors[key].dtype

    def find(self, source: TensorSource) -> str | None:
        """The key under which the checkpoint has `source`'s tensor, if it has it."""
        return next((key for key in (source.key, *source.aliases) if key in self.tensors), None)

    def check(self, spec: DecoderSpec) -> None:
        """Check that every parameter of `spec` is there with the right shape and a type that can be loaded.

        Raises:
            ValueError: names the first few that are not.
        """
        problems = []
        tensor_source = family(spec.model_type).tensor_source
        expected: dict[str, Shape] = {}
        for name, shape in parameters(spec):
            source = tensor_source(name, spec)
            key = self.find(source)
            if key is None:
                problems.append(f"{source.key} is missing")
                continue
            # Where parameters share a tensor, the last of them tells its full size.
            rows = shape[0] if source.rows is None else max(sum(source.rows), expected.get(key, (0,))[0])
            full = (rows, *shape[1:])
            expected[key] = full
        for key, full in expected.items():
            problems += self._problems(key, full, transposed=None)
        if problems:
            more = f" and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
            raise ValueError(
                f"the weights in {self.folder} do not fit its config.json: {'; '.join(problems[:_NAMED_PROBLEMS])}{more}"
            )
