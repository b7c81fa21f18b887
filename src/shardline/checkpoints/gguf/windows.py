"""Architectures of GGUF whose layers have a window or none, in the terms of transformers."""

from __future__ import annotations

from typing import Any

from shardline.checkpoints.gguf.metadata import Metadata, rope_scaling, rounded

FULL, WINDOWED = "full_attention", "sliding_attention"


def layer_types(m: Metadata, usual_interval: int) -> list[str]:
    """The kind of each layer. If the file does not say it, every `usual_interval`-th layer has no window."""
    if m.has("attention.sliding_window_pattern"):
        return [WINDOWED if number else FULL for number in m.layer_numbers("attention.sliding_window_pattern")]
    return [WINDOWED if (index + 1) % usual_interval else FULL for index in range(m.num_blocks())]


def olmo2(m: Metadata) -> dict[str, Any]:
    """OLMo 2, or OLMo 3, which has windows; only its full layers stretch their rope."""
    bias = {"attention_bias": m.has_tensor("blk.0.attn_q.bias")}
    if not m.has("attention.sliding_window"):
        return {"model_type": "olmo2", **bias}
    theta = m.number("rope.freq_base", 500_000.0)
    full = (rope_scaling(m) or {"rope_type": "default"}) | {"rope_theta": theta}
    windowed = {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", theta)}
    return {
        "model_type": "olmo3",
        **bias,
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": layer_types(m, 4),
        "rope_scaling": None,
        "rope_parameters": {FULL: full, WINDOWED: windowed},
    }


def exaone4(m: Metadata) -> dict[str, Any]:
    """EXAONE 4. Without a window in the file, all layers are full, and have rope."""
    window = m.integer("attention.sliding_window", 0) or None
    own: dict[str, Any] = {"model_type": "exaone4", "sliding_window": window}
    return own if window is None else own | {"layer_types": layer_types(m, 4)}


def cohere2(m: Metadata) -> dict[str, Any]:
    """Command R7B, Command A."""
    head_dim = m.width_per_head()
    if (rotated := m.integer("rope.dimension_count", head_dim)) != head_dim:
        raise m.error("rope.dimension_count", f"must be the size of a head, {head_dim}, got {rotated}")
    return {
        "model_type": "cohere2",
        "layer_norm_eps": rounded(m.number("attention.layer_norm_epsilon")),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": layer_types(m, 4),
        "logit_scale": rounded(m.number("logit_scale")),
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
    }
