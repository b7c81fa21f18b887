"""LoRA adapters in GGUF, as llama.cpp's converter writes them.

Each weight that the adapter changes has two tensors beside its own name: `blk.0.attn_q.weight.lora_a` [rank, in] and
`.lora_b` [out, rank]. Those of experts are stacked, as their weights are. The inner one of the embedding is transposed.
The scale is `adapter.lora.alpha` / rank.
"""

from __future__ import annotations

import math
from pathlib import Path

from shardline.checkpoints.gguf.checkpoint import Place, interleaved_heads, possible_places
from shardline.checkpoints.gguf.header import PLAIN_TYPES, GGUFHeader, GGUFTensor, read_header
from shardline.models.adapters import EMBEDDING, LARGEST_ALPHA, LinearChange, adaptable_parameters
from shardline.models.parts import Shape
from shardline.models.spec import DecoderSpec
from shardline.models.stored_layout import TensorEntry

_SUFFIXES = (".lora_a", ".lora_b")


def read_changes(file: Path, spec: DecoderSpec) -> tuple[LinearChange, ...]:
    """What the adapter in `file` changes in the model `spec`. Only the header is read.

    Raises:
        ValueError: it is no adapter, is damaged, or fits another model.
    """
    header = read_header(file)
    alpha = _alpha(header)
    left = dict(header.tensors)
    changes: list[LinearChange] = []
    for name, shape in adaptable_parameters(spec):
        stored = shape[::-1] if name == EMBEDDING else shape
        places = [
            place for place in possible_places(name, stored, spec) if f"{place.key}.lora_b" in header.tensors
        ]  # one key may be a linear, or several that are stacked
        if not places:
            continue
        rows = header.tensors[f"{places[0].key}.lora_b"].shape[0]
        place = next((place for place in places if place.shape[0] == rows), places[0])
        changes.append(_change(name, shape, place, header, alpha, spec))
        for suffix in _SUFFIXES:
            left.pop(f"{place.key}{suffix}", None)
    if left:
        raise ValueError(
            f"it changes {next(iter(left))[:200]}, which this model does not have, or where adapters are not supported "
            "yet (norms, routers, latent up-projections)"
        )
    return tuple(changes)


def _alpha(header: GGUFHeader) -> float:
    metadata = header.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise ValueError("general.type and adapter.type do not say that it is a LoRA adapter")
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not abs(alpha) <= LARGEST_ALPHA:
        raise ValueError(f"adapter.lora.alpha is {alpha!r:.40}")
    return float(alpha)


def _change(name: str, shape: Shape, place: Place, header: GGUFHeader, alpha: float, spec: DecoderSpec) -> LinearChange:
    """`shape`: [out, in] of the linear, whose rows are at `place`."""
    key, transposed = place.key, name == EMBEDDING
    down, up = (header.tensors.get(f"{key}{suffix}") for suffix in _SUFFIXES)
    if down is None or up is None:
        raise ValueError(f"{key} has only one of lora_a and lora_b")
    outputs, inputs = shape[0] if transposed else place.shape[-2], shape[1]
    experts = () if transposed else place.shape[:-2]
    inner = down.shape[::-1] if transposed else down.shape
    rank = up.shape[-1]
    if inner != (*experts, rank, inputs) or up.shape != (*experts, outputs, rank) or rank < 1:
        each = f" for each of {experts[0]} experts" if experts else ""
        raise ValueError(
            f"{key} has lora_a {list(down.shape)} and lora_b {list(up.shape)}, and a linear {[outputs, inputs]} of "
            f"this model needs [rank, in] and [out, rank]{each}; the adapter is of another model"
        )
    for tensor in (down, up):
        if tensor.type.name not in PLAIN_TYPES:
            raise ValueError(f"{key} has type {tensor.type.name}; supported: {', '.join(PLAIN_TYPES)}")
    architecture = header.metadata.get("general.architecture")
    return LinearChange(
        name,
        _entry(down),
        _entry(up),
        slice(place.first_row, place.first_row + shape[0]),
        rank,
        alpha / rank if alpha else 1.0,
        transposed=transposed,
        interleaved_heads=interleaved_heads(name, spec, architecture),
        expert=place.first_row // outputs if experts else 0,
        num_experts=math.prod(experts),
    )


def _entry(tensor: GGUFTensor) -> TensorEntry:
    return TensorEntry(tensor.file, tensor.type.name, tensor.shape, tensor.offset, tensor.num_bytes)
