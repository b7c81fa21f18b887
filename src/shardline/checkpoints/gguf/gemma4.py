"""Gemma 4 in GGUF: numbers that differ between layers with a window and full layers, in the terms of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardline.checkpoints.gguf.metadata import Metadata
from shardline.checkpoints.gguf.windows import FULL, WINDOWED

_NOT_ROTATED = np.float32(1e30)
"""What the file divides the frequencies of pairs by that do not rotate."""


def gemma4_config(m: Metadata) -> dict[str, Any]:
    """The keys of a config.json for gemma4_text that other architectures do not share.

    Raises:
        ValueError: layers differ in a way that this model type does not have.
    """
    is_windowed = [bool(number) for number in m.layer_numbers("attention.sliding_window_pattern")]
    sizes, shared = m.layer_numbers("feed_forward_length"), m.integer("attention.shared_kv_layers", 0)
    if not 0 <= shared < len(sizes):
        raise m.error("attention.shared_kv_layers", f"must leave some of {len(sizes)} layers, got {shared}")
    is_wide = sizes != sizes[:1] * len(sizes)
    doubled = [sizes[0] * (1 + (index >= len(sizes) - shared)) for index in range(len(sizes))]
    if is_wide and sizes != doubled:
        raise m.error("feed_forward_length", f"must be the same, or doubled in the last {shared} layers, got {sizes}")
    head_dim = m.integer("attention.key_length_swa")
    if (rotated := m.integer("rope.dimension_count_swa", head_dim)) != head_dim:
        raise m.error("rope.dimension_count_swa", f"must be the size of a head, {head_dim}, got {rotated}")
    config: dict[str, Any] = {
        "model_type": "gemma4_text",
        "layer_types": [WINDOWED if windowed else FULL for windowed in is_windowed],
        "sliding_window": m.integer("attention.sliding_window"),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        "num_key_value_heads": _kv_heads(m, is_windowed, True),
        "head_dim": head_dim,
        "attention_k_eq_v": _value_is_key(m, is_windowed, len(is_windowed) - shared),
        "num_kv_shared_layers": shared,
        "rope_scaling": None,
        "rope_parameters": _ropes(m),
        **_full_attention(m, is_windowed),
        **_token_input(m),
    }
    if m.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = m.number("final_logit_softcapping")
    if m.integer("expert_count", 0):
        config |= {
            "enable_moe_block": True,
            "num_experts": m.integer("expert_count"),
            "top_k_experts": m.integer("expert_used_count"),
            "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        }
    return config


def _full_attention(m: Metadata, is_windowed: list[bool]) -> dict[str, Any]:
    """The sizes of layers without a window. They hold whether or not values are keys."""
    sizes = {"head_dim": m.integer("attention.key_length"), "num_key_value_heads": _kv_heads(m, is_windowed, False)}
    return {"per_layer_config": {str(is_windowed.index(False)): sizes}}


def _kv_heads(m: Metadata, is_windowed: list[bool], kind: bool) -> int:
    """Heads of keys and values of the layers with a window, or of those without one."""
    numbers = m.layer_numbers("attention.head_count_kv")
    found = {number for number, windowed in zip(numbers, is_windowed, strict=True) if windowed == kind}
    if len(found) != 1:
        name = WINDOWED if kind else FULL
        raise m.error("attention.head_count_kv", f"must be one number for all layers with {name}, got {numbers}")
    return found.pop()


def _value_is_key(m: Metadata, is_windowed: list[bool], num_own: int) -> bool:
    """Whether full layers have no projection of values. Layers from `num_own` on read the cache of earlier ones."""
    full = [index for index in range(num_own) if not is_windowed[index]]
    return not any(m.has_tensor(f"blk.{index}.{key}.weight") for index in full for key in ("attn_v", "attn_qkv"))


def _ropes(m: Metadata) -> dict[str, Any]:
    """Both ropes. A tensor tells which pairs of a full layer's heads rotate: the first ones."""
    factors = np.array(m.factors("rope_freqs.weight") or [1.0], np.float32)
    rotated = int((factors == 1.0).sum())
    if not ((factors[:rotated] == 1.0).all() and (factors[rotated:] == _NOT_ROTATED).all()):
        raise m.header.error("rope_freqs.weight", "must be ones, and then 1e30 for pairs that do not rotate")
    full = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}
    return {
        FULL: full | {"rope_theta": m.number("rope.freq_base", 1_000_000.0)},
        WINDOWED: {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", 10_000.0)},
    }


def _token_input(m: Metadata) -> dict[str, Any]:
    """What layers read of each token. The tensor may have more rows than there are tokens."""
    size = m.integer("embedding_length_per_layer_input", 0)
    table = m.checkpoint.tensors.get("per_layer_token_embd.weight")
    rows = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size, **rows}
