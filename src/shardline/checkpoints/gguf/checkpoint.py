"""The tensors of a GGUF checkpoint, in one file or several parts, compared with a model before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardline.checkpoints.gguf.header import LOADABLE_TYPES, PLAIN_TYPES, GGUFHeader, GGUFTensor, read_header
from shardline.checkpoints.gguf.names import all_parts
from shardline.checkpoints.gguf.places import possible_places
from shardline.checkpoints.stored.gguf import form_of
from shardline.models.parameters import Shape, is_linear, parameters, parse_name
from shardline.models.spec import GQA, DecoderSpec
from shardline.models.stored_layout import Form
from shardline.models.stored_weights import StoredRules

_NAMED_PROBLEMS = 5
_INTERLEAVED = ("llama", "mistral3", "granite", "smollm3")
"""Architectures whose files hold the rows of a q or k head in another order: first row, middle row, second row, ..."""
_UNUSED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|.*\.(attn_rot_embd|rotary_emb).*")
"""Tensors that are read for the configuration, or that repeat it."""
_LAYER = re.compile(r"blk\.(\d+)\.")
_KEYS_AND_VALUES = ("attn_k.weight", "attn_k_norm.weight", "attn_v.weight")
SPLIT_LATENT_KEYS = ("attn_k_b.weight", "attn_v_b.weight")
"""The tensors of a layer whose up-projection of keys and values is two tensors."""


class FoundPlace(NamedTuple):
    """The place of a parameter: rows of a tensor whose dims before the last are flattened. Vectors have one column."""

    key: str
    tensor: GGUFTensor
    first_row: int
    rows: int
    columns: int
    interleaved_heads: int
    """Rows of a head, if they are in another order (see `original_rows`); 0: they are not."""
    first_column: int = 0
    """See `Place`."""
    row_columns: int = 0
    """See `Place`."""


@dataclass(frozen=True)
class GGUFCheckpoint:
    """The tensors of a model, by their names in the file."""

    header: GGUFHeader
    """That of the first part, which has the metadata."""
    files: tuple[Path, ...]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, file: Path) -> GGUFCheckpoint:
        """Read the headers of `file` and of all other parts of its model.

        Raises:
            ValueError: a part is missing, corrupt or truncated. The message names it.
        """
        files = all_parts(file)
        headers = [read_header(part) for part in files]
        tensors: dict[str, GGUFTensor] = {}
        for header in headers:
            for key, tensor in header.tensors.items():
                if key in tensors:
                    raise ValueError(f"tensor {key!r} is in {tensor.file} and in {tensors[key].file.name}")
                tensors[key] = tensor
        for number, header in enumerate(headers):
            count, own = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
            if (count, own) != (len(files), number) and (len(files) > 1 or count not in (0, 1)):
                raise ValueError(
                    f"{header.file} is part {own} of {count} by its metadata (split.no, split.count), and part "
                    f"{number} of {len(files)} by its name; restore the names under which the parts were published"
                )
        expected = headers[0].metadata.get("split.tensors.count", len(tensors))
        if len(files) > 1 and expected != len(tensors):
            raise ValueError(f"the parts of {files[0]} have {len(tensors)} tensors, not {expected}; get them again")
        return cls(headers[0], files, tensors)

    @property
    def architecture(self) -> str:
        """The `general.architecture` of the metadata.

        Raises:
            ValueError: it is missing.
        """
        value = self.header.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise self.header.error("general.architecture", "is missing")
        return value

    def find(self, name: str, shape: Shape, spec: DecoderSpec) -> FoundPlace:
        """The place of the canonical parameter `name`, whose whole shape is `shape`.

        Raises:
            ValueError: it is missing, or has another shape.
        """
        first_problem = ""
        for key, tensor_shape, *where in possible_places(name, shape, spec):
            if key not in self.tensors:
                first_problem = first_problem or f"{key} is missing"
                continue
            tensor = self.tensors[key]
            if tuple(size for size in tensor.shape if size != 1) != tuple(size for size in tensor_shape if size != 1):
                if not first_problem or first_problem.endswith("is missing"):
                    first_problem = f"{key} has shape {list(tensor.shape)}, not {list(tensor_shape)}"
                continue
            columns = shape[1] if len(shape) == 2 else 1
            heads, (first_row, *in_rows) = self._interleaved_heads(name, spec), where
            return FoundPlace(key, tensor, first_row, shape[0], columns, heads, *in_rows)
        raise ValueError(first_problem)

    def forms(self, spec: DecoderSpec) -> Callable[[str], Form | None]:
        """What each linear weight of `spec`, which fits, and its embedding need if they stay packed; None: the file has
        not packed it."""
        shapes = {name: shape for name, shape in parameters(spec) if is_linear(name) or name == "embed.weight"}

        def form(name: str) -> Form | None:
            return form_of(self.find(name, shapes[name], spec).tensor.type.name) if name in shapes else None

        return form

    def has_split_latents(self, layer: int) -> bool:
        """Whether the up-projection of keys and values is two tensors: attn_k_b [heads, latent, key], and attn_v_b."""
        prefix = f"blk.{layer}."
        whole = f"{prefix}attn_kv_b.weight" in self.tensors
        return not whole and all(f"{prefix}{key}" in self.tensors for key in SPLIT_LATENT_KEYS)

    def check(self, spec: DecoderSpec, rules: StoredRules | None = None) -> None:
        """Check that every parameter of `spec` exists, with the right shape and a type that can be loaded, and that
        the file has no tensor that the model does not use. Headers say how each tensor is packed, so `rules` are not
        needed.

        Raises:
            ValueError: there are problems. The message names the first few.
        """
        problems: list[str] = []
        used: set[str] = set()
        for name, shape in parameters(spec):
            layer, part, _ = parse_name(name)
            if part == "attention.kv_up" and layer is not None and self.has_split_latents(layer):
                keys = [f"blk.{layer}.{key}" for key in SPLIT_LATENT_KEYS]
            else:
                try:
                    keys = [self.find(name, shape, spec).key]
                except ValueError as problem:
                    problems.append(str(problem))
                    continue
            for key in keys:
                used.add(key)
                kind = self.tensors[key].type.name
                if kind not in (LOADABLE_TYPES if len(shape) == 2 else PLAIN_TYPES):
                    problems.append(f"{key} has type {kind}; supported: {', '.join(LOADABLE_TYPES)}")
        problems += [
            f"{key} is there, but this model type does not have it"
            for key in self.tensors
            if key not in used and not self._is_passed_over(key, spec)
        ]
        if problems:
            problems = list(dict.fromkeys(problems))
            more = f"; and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
            raise ValueError(
                f"the weights in {self.header.file} cannot be loaded as {spec.model_type}: "
                f"{'; '.join(problems[:_NAMED_PROBLEMS])}{more}; use another quant of the model"
            )

    def _is_passed_over(self, key: str, spec: DecoderSpec) -> bool:
        """Whether the tensor is for the configuration, belongs to a layer that predicts further tokens, or makes keys
        and values of a layer that reads those of another."""
        found = _LAYER.match(key)
        if found is None or (layer := int(found.group(1))) >= len(spec.layers):
            return _UNUSED.fullmatch(key) is not None or found is not None
        attention = spec.layers[layer].attention
        reads_only = isinstance(attention, GQA) and attention.kv_source is not None
        return _UNUSED.fullmatch(key) is not None or (reads_only and key[found.end() :] in _KEYS_AND_VALUES)

    def _interleaved_heads(self, name: str, spec: DecoderSpec) -> int:
        layer, part, _ = parse_name(name)
        if layer is None or part not in ("attention.q", "attention.k") or self.architecture not in _INTERLEAVED:
            return 0
        attention = spec.layers[layer].attention
        return attention.head_dim if isinstance(attention, GQA) else 0
