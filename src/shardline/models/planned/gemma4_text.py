"""Gemma 4: windowed layers; full layers with wider heads, whose values are their keys; experts and a dense block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.hf_config import HFConfig, read_dims
from shardline.models.llama_layout import FOUR_NORM_LAYER_KEYS, MOE_LAYER_KEYS, llama_source, windowed_layers
from shardline.models.spec import GQA, DecoderSpec, Dense, Layer, MoE, Norm, PlannedGQA, Routing, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    **FOUR_NORM_LAYER_KEYS,
    "feed_forward.router": "router",
    "feed_forward.experts.*.gate": "experts.*.gate_proj",
    "feed_forward.experts.*.up": "experts.*.up_proj",
    "feed_forward.experts.*.down": "experts.*.down_proj",
    "feed_forward.shared.gate": "mlp.gate_proj",
    "feed_forward.shared.up": "mlp.up_proj",
    "feed_forward.shared.down": "mlp.down_proj",
}

REFUSAL = "the engine has no layers whose values are their keys"
"""Why the engine cannot load the model type."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=9216,
        num_layers=32,
        num_heads=32,
        num_kv_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
    )
    if hf.integer("hidden_size_per_layer_input", 0, minimum=0):
        raise hf.error("hidden_size_per_layer_input", "is not supported: embeddings per layer have no spec")
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    windowed = replace(GQA(dims.num_heads, dims.num_kv_heads, dims.head_dim, 1.0), qk_norm=norm)
    full = PlannedGQA(
        dims.num_heads,
        num_kv_heads=hf.integer("num_global_key_value_heads", dims.num_kv_heads),
        head_dim=hf.integer("global_head_dim", dims.head_dim),
        scale=1.0,
        qk_norm=norm,
        value_is_key=hf.flag("attention_k_eq_v", False),
    )
    dense = Dense(dims.intermediate_size, hf.activation("hidden_activation", "gelu_pytorch_tanh"))
    feed_forward: Dense | MoE = dense
    if hf.flag("enable_moe_block", False):
        routing = Routing(hf.integer("num_experts"), hf.integer("top_k_experts"), normalized=True)
        expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size"))
        feed_forward = MoE(routing, expert, shared=dense)
    default_types = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(dims.num_layers)]
    windows = hf.layer_windows(dims.num_layers, hf.optional_integer("sliding_window", 1024), default_types)

    def layer(window: int | None) -> Layer:
        own = full if window is None else replace(windowed, window=window)
        return Layer(own, feed_forward, norm, norm, norm, norm)

    return DecoderSpec(
        model_type="gemma4_text",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(windows, layer),
        final_norm=norm,
        max_position_embeddings=dims.max_position_embeddings,
        dtype=hf.dtype(),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, _LAYER_KEYS)
