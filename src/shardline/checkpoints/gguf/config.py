"""A config.json for a GGUF file, from its metadata and the shapes and types of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.checkpoints.gguf.architectures import ARCHITECTURES
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.gguf.header import PACKED_TYPES, GGUFHeader, end_token_ids
from shardline.checkpoints.gguf.metadata import Metadata, rope_scaling, rounded
from shardline.checkpoints.lookup import NORMS_HOLD_OFFSET
from shardline.checkpoints.wrapper import text_config

_SIZES: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
}
"""Keys of a config.json, and of a file's metadata, that state the same."""
_OTHER_KINDS: Mapping[str, str] = {
    "mmproj": "an image or audio encoder",
    "clip": "an image or audio encoder",
    "imatrix": "an importance matrix",
    "adapter": "an adapter (LoRA)",
    "vocab": "a vocabulary",
}
"""What files are by their `general.type`, or by the architecture of all encoders."""


def read_config(checkpoint: GGUFCheckpoint, beside: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config.json of the model in the file, in the terms of transformers.

    `beside` is the config.json in the file's folder. If it describes the model, it is used, except for what the tensors
    say: the size of the vocabulary, whether embeddings are tied, and the type of the weights.

    Raises:
        ValueError: the architecture is not supported, or an entry is missing or wrong.
    """
    _check_kind(checkpoint.header)
    metadata = Metadata(checkpoint)
    if metadata.architecture not in ARCHITECTURES:
        raise metadata.header.error(
            "general.architecture",
            f"is {metadata.architecture!r}, which is not supported; supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    given = text_config(beside or {})
    # Some repositories have a config.json with nothing but a model_type.
    describes = "hidden_size" in given or "n_embd" in given
    if describes:
        _check_beside(given, metadata)
    config = given if describes else _decoder(metadata)
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    return (
        config
        | _quantization(checkpoint)
        | {
            "vocab_size": _vocab_size(checkpoint),
            "tie_word_embeddings": not metadata.has_tensor("output.weight"),
            "dtype": _dtype(checkpoint),
            NORMS_HOLD_OFFSET: True,
        }
    )


def _check_kind(header: GGUFHeader) -> None:
    """Refuse the files that lie beside a language model, by what they are.

    Raises:
        ValueError: the file is one of these.
    """
    for key in ("general.type", "general.architecture"):
        what = _OTHER_KINDS.get(str(header.metadata.get(key)))
        if what is not None:
            raise header.error(key, f"says that this is {what}, no language model; give the file of the model itself")


def _check_beside(given: Mapping[str, Any], m: Metadata) -> None:
    """Refuse a config.json beside the file that is of another model.

    Raises:
        ValueError: it states other sizes than the file.
    """
    for key, own in _SIZES.items():
        stated = given.get(key)
        if stated is not None and m.has(own) and stated != (size := m.integer(own)):
            raise ValueError(
                f"{m.header.file}: the config.json beside it is of another model ({key} is {stated!r:.20}, and the "
                f"file's {own} is {size}); move one of them to another folder"
            )


def _quantization(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """The quantization_config: the type that most bytes of packed weights have, and all types for people."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.type.name in PACKED_TYPES:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
    if not sizes:
        return {}
    names = sorted(sizes, key=lambda name: -sizes[name])
    return {"quantization_config": {"quant_method": "gguf", "type": names[0], "summary": ", ".join(names)}}


def _dtype(checkpoint: GGUFCheckpoint) -> str:
    """The type of activations that fits the weights. A few bits and a scale are precise enough in bfloat16."""
    kinds = {tensor.type.name for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1}
    if kinds & set(PACKED_TYPES) or "BF16" in kinds:
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"


def _vocab_size(checkpoint: GGUFCheckpoint) -> int:
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{checkpoint.header.file} has no token_embd.weight, so it is no whole language model")
    return embedding.shape[0]


def _decoder(m: Metadata) -> dict[str, Any]:
    """The keys that decoders share, and those of the architecture."""
    own = ARCHITECTURES[m.architecture](m)
    heads = m.integer("attention.head_count")
    shared: dict[str, Any] = {
        "hidden_size": m.integer("embedding_length"),
        "num_hidden_layers": m.num_blocks() - m.integer("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "max_position_embeddings": m.integer("context_length"),
    }
    if ends := end_token_ids(m.header):
        shared["eos_token_id"] = list(ends)
    if "num_key_value_heads" not in own:
        shared["num_key_value_heads"] = m.integer("attention.head_count_kv", heads)
    if "intermediate_size" not in own and m.has("feed_forward_length"):
        shared["intermediate_size"] = m.integer("feed_forward_length")
    if m.has("attention.layer_norm_rms_epsilon"):
        shared["rms_norm_eps"] = rounded(m.number("attention.layer_norm_rms_epsilon"))
    if m.has("attention.key_length"):
        shared["head_dim"] = m.integer("attention.key_length")
    if m.has("rope.freq_base"):
        shared["rope_theta"] = m.number("rope.freq_base")
    if scaling := rope_scaling(m):
        shared["rope_scaling"] = scaling
    return shared | own
