"""What Llama-like model types share: checkpoint keys, attention and layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardline.models.config_fields import Dims
from shardline.models.parameters import expert_of, parse_name
from shardline.models.spec import GQA, Dense, Layer, MoE, Norm, Rope, TensorSource

_MODEL_KEYS = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
LAYER_KEYS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""Maps a canonical part to its key below `model.layers.{i}.`, for pre-norm models."""

MOE_LAYER_KEYS: Mapping[str, str] = {
    **LAYER_KEYS,
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.*.gate": "mlp.experts.*.gate_proj",
    "feed_forward.experts.*.up": "mlp.experts.*.up_proj",
    "feed_forward.experts.*.down": "mlp.experts.*.down_proj",
    "feed_forward.shared.gate": "mlp.shared_expert.gate_proj",
    "feed_forward.shared.up": "mlp.shared_expert.up_proj",
    "feed_forward.shared.down": "mlp.shared_expert.down_proj",
    "feed_forward.shared_gate": "mlp.shared_expert_gate",
}
"""The same for models with experts. An asterisk stands for the number of an expert."""

FOUR_NORM_LAYER_KEYS: Mapping[str, str] = {
    **LAYER_KEYS,
    "post_attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "post_feed_forward_norm": "post_feedforward_layernorm",
}
"""The same for models with a norm before and after each block."""


def llama_source(name: str, layer_keys: Mapping[str, str] = LAYER_KEYS) -> TensorSource:
    """The place of the canonical parameter `name` in a checkpoint with Llama's key names.

    Raises:
        ValueError: such checkpoints do not have this parameter.
    """
    layer, part, kind = parse_name(name)
    keys = _MODEL_KEYS if layer is None else layer_keys
    expert = expert_of(part)
    pattern = part if expert is None else part.replace(f".{expert}.", ".*.")
    if pattern not in keys:
        raise ValueError(f"{name!r} is no parameter of this model type")
    key = keys[pattern] if expert is None else keys[pattern].replace("*", str(expert))
    prefix = "" if layer is None else f"model.layers.{layer}."
    return TensorSource(f"{prefix}{key}.{kind}")


def attention(dims: Dims, rope: Rope, *, scale: float | None = None, window: int | None = None) -> GQA:
    """Plain grouped-query attention. `scale` None means 1 / sqrt(head_dim)."""
    scale = dims.head_dim**-0.5 if scale is None else scale
    return GQA(dims.num_heads, dims.num_kv_heads, dims.head_dim, scale, rope=rope, window=window)


def windowed_layers(windows: list[int | None], layer: Callable[[int | None], Layer]) -> tuple[Layer, ...]:
    """One layer per window. Layers with the same window are the same object."""
    by_window = {window: layer(window) for window in windows}
    return tuple(by_window[window] for window in windows)


def pre_norm_layer(attention: GQA, feed_forward: Dense | MoE, norm: Norm) -> Layer:
    """A layer with the norm `norm` before each of its two blocks."""
    return Layer(attention, feed_forward, attention_norm=norm, feed_forward_norm=norm)
