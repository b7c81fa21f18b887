"""The tensors of a GGUF checkpoint, in one file or several parts, compared with a model before anything is loaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardline.checkpoints.gguf.header import (
    LOADABLE_TYPES,
    PLAIN_TYPES,
    BlockType,
    GGUFHeader,
    GGUFTensor,
    read_header,
)
from shardline.checkpoints.gguf.names import all_parts
from shardline.checkpoints.stored.gguf import form_of
from shardline.models.attention import Attention
from shardline.models.feed_forward import FeedForward
from shardline.models.parameters import expert_of, is_linear, parameters, parse_name
from shardline.models.parts import Shape
from shardline.models.spec import DecoderSpec
from shardline.models.stored_layout import Form
from shardline.models.stored_weights import Packing, StoredRules, StoredWeights

_MODEL_KEYS: Mapping[str, str] = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "token_input_norm": "per_layer_proj_norm",
}
_LAYER_KEYS: Mapping[str, str] = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.q_down": "attn_q_a",
    "attention.q_up": "attn_q_b",
    "attention.kv_down": "attn_kv_a_mqa",
    "attention.kv_norm": "attn_kv_a_norm",
    "attention.kv_up": "attn_kv_b",
    "post_attention_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "post_feed_forward_norm": "post_ffw_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.shared.gate": "ffn_gate_shexp",
    "feed_forward.shared.up": "ffn_up_shexp",
    "feed_forward.shared.down": "ffn_down_shexp",
    "feed_forward.shared_gate": "ffn_gate_inp_shexp",
    "feed_forward.experts_norm": "pre_ffw_norm_2",
    "feed_forward.experts_output_norm": "post_ffw_norm_2",
    "feed_forward.shared_output_norm": "post_ffw_norm_1",
    "token_input.gate": "inp_gate",
    "token_input.down": "proj",
    "token_input.norm": "post_norm",
}
_WHOLE_KEYS: Mapping[str, str] = {
    "attention.sinks": "attn_sinks.weight",
    "feed_forward.router_logits": "ffn_gate_inp.bias",
    "feed_forward.router_norm": "ffn_gate_inp.scale",
    "feed_forward.expert_scale": "ffn_down_exps.scale",
    "output_scale": "layer_output_scale.weight",
}
"""Parts whose tensors end in another way than other weights and biases."""
_LATENT_Q_NORM = "attn_q_a_norm"
_SHARED = "feed_forward.shared."


class Place(NamedTuple):
    """A place where a parameter may be: rows of a tensor whose dims before the last are flattened."""

    key: str
    shape: Shape
    """Shape of the whole tensor, without dims of size 1."""
    first_row: int
    first_column: int = 0
    """The parameter's first column."""
    row_columns: int = 0
    """Columns of the tensor; 0: as many as the parameter has."""


def possible_places(name: str, shape: Shape, spec: DecoderSpec) -> Iterator[Place]:
    """The places where the canonical parameter `name` of `shape` may be, the usual one first."""
    layer, part, kind = parse_name(name)
    if layer is None:
        yield Place(f"{_MODEL_KEYS[part]}.{kind}", _squeezed(shape), 0)
        return
    expert = expert_of(part)
    if expert is not None:
        routing = spec.layers[layer].feed_forward.routing
        assert routing is not None, f"{name} belongs to an expert"
        own = part.rpartition(".")[2]
        yield from _expert_places(layer, own, kind, shape, expert, routing.num_experts)
        return
    prefix = f"blk.{layer}."
    if part in _WHOLE_KEYS:
        yield Place(f"{prefix}{_WHOLE_KEYS[part]}", _squeezed(shape), 0)
        return
    if part in ("token_input.embed", "token_input.projection"):
        yield _token_input_place(layer, part, shape, len(spec.layers))
        return
    if part == "feed_forward.router" and kind == "bias":
        yield Place(f"{prefix}exp_probs_b.bias", shape, 0)
    if part == "attention.q_norm" and spec.layers[layer].attention.latent_sizes:
        yield Place(f"{prefix}{_LATENT_Q_NORM}.{kind}", shape, 0)
        return
    if part in _LAYER_KEYS:
        yield Place(f"{prefix}{_LAYER_KEYS[part]}.{kind}", _squeezed(shape), 0)
    if part.startswith(_SHARED):
        # Where every layer has a dense block beside its experts, the file names it like one.
        yield Place(f"{prefix}ffn_{part.removeprefix(_SHARED)}.{kind}", _squeezed(shape), 0)
    if part == "feed_forward_norm" and spec.layers[layer].post_attention_norm is None:
        # Some files name this norm by the block that it follows, others by the one that it precedes.
        yield Place(f"{prefix}post_attention_norm.{kind}", _squeezed(shape), 0)
    yield from _fused_places(prefix, part, kind, shape, spec.layers[layer].attention, spec.layers[layer].feed_forward)


def _token_input_place(layer: int, part: str, shape: Shape, num_layers: int) -> Place:
    """The place of what a layer reads of each token, in a tensor that holds it for all layers."""
    rows, columns = shape
    if part == "token_input.embed":
        width = num_layers * columns
        return Place("per_layer_token_embd.weight", (rows, width), 0, layer * columns, width)
    return Place("per_layer_model_proj.weight", (num_layers * rows, columns), layer * rows)


def _fused_places(
    prefix: str, part: str, kind: str, shape: Shape, attention: Attention, feed_forward: FeedForward
) -> Iterator[Place]:
    """Places in tensors that hold q, k and v, or gate and up, one after another."""
    if not attention.latent_sizes and part in ("attention.q", "attention.k", "attention.v"):
        q_size, kv_size = attention.num_heads * attention.key_dim, attention.num_kv_heads * attention.key_dim
        first = {"attention.q": 0, "attention.k": q_size, "attention.v": q_size + kv_size}[part]
        yield Place(f"{prefix}attn_qkv.{kind}", (q_size + 2 * kv_size, *shape[1:]), first)
    if feed_forward.routing is None and feed_forward.block.gated and part in ("feed_forward.gate", "feed_forward.up"):
        first = 0 if part == "feed_forward.gate" else shape[0]
        yield Place(f"{prefix}ffn_up.{kind}", (2 * shape[0], *shape[1:]), first)


def _expert_places(layer: int, part: str, kind: str, shape: Shape, expert: int, num_experts: int) -> Iterator[Place]:
    prefix, rows = f"blk.{layer}.ffn_", shape[0]
    yield Place(f"{prefix}{part}_exps.{kind}", _squeezed((num_experts, *shape)), expert * rows)
    if part in ("gate", "up"):
        first = (2 * expert + (part == "up")) * rows
        yield Place(f"{prefix}gate_up_exps.{kind}", _squeezed((num_experts, 2 * rows, *shape[1:])), first)
    # Files of the first mixtures have a tensor for each expert.
    yield Place(f"{prefix}{part}.{expert}.{kind}", _squeezed(shape), 0)


def _squeezed(shape: Shape) -> Shape:
    """The shape without dims of size 1: files leave some of them out."""
    return tuple(size for size in shape if size != 1)


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
            heads, (first_row, *in_rows) = interleaved_heads(name, spec, self.architecture), where
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
        reads_only = attention.kv_source is not None
        return _UNUSED.fullmatch(key) is not None or (reads_only and key[found.end() :] in _KEYS_AND_VALUES)


def interleaved_heads(name: str, spec: DecoderSpec, architecture: object) -> int:
    """Rows of a head of the parameter, if files of the architecture have them in another order; 0: they have not."""
    layer, part, _ = parse_name(name)
    if layer is None or part not in ("attention.q", "attention.k") or architecture not in _INTERLEAVED:
        return 0
    return spec.layers[layer].attention.key_dim


@dataclass(frozen=True, eq=False)
class GGUFStoredWeights(StoredWeights):
    """See `StoredWeights`. Headers say how each linear weight is packed."""

    checkpoint: GGUFCheckpoint
    spec: DecoderSpec

    def layer_class(self, index: int) -> Hashable:
        """Equal for layers whose weights are packed alike."""
        names = (part for part, _ in self.spec.layers[index].parameters(self.spec.hidden_size, num_experts=1))
        return tuple(self.packing(f"layers.{index}.{name}") for name in names)

    def _find_packing(self, name: str) -> Packing | None:
        shape = self._shapes.get(name)
        if shape is None:
            return None
        kind = self.checkpoint.find(name, shape, self.spec).tensor.type
        return None if kind.name in PLAIN_TYPES else packing_of(kind)

    @functools.cached_property
    def _shapes(self) -> dict[str, Shape]:
        return {name: shape for name, shape in parameters(self.spec) if is_linear(name) and name != "lm_head.weight"}


def packing_of(kind: BlockType) -> Packing:
    """The bytes of weights of a type: whole bits for each element, and the rest for each block."""
    bits = 8 * kind.block_bytes // kind.block_elements
    rest = kind.block_bytes - bits * kind.block_elements // 8
    return Packing(kind.name.lower(), bits, block_rows=1, block_columns=kind.block_elements, scale_bytes=rest)
