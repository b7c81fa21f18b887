"""Llama 4: attention in chunks of 8,192 tokens in three of four layers, and experts with a shared block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.hf_config import HFConfig, read_dims
from shardline.models.llama_layout import MOE_LAYER_KEYS, llama_source, pre_norm_layer
from shardline.models.spec import GQA, DecoderSpec, Dense, MoE, Norm, Routing, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "feed_forward.router",
    "feed_forward.gate": "feed_forward.gate_proj",
    "feed_forward.up": "feed_forward.up_proj",
    "feed_forward.down": "feed_forward.down_proj",
    "feed_forward.experts.*.gate": "feed_forward.experts.*.gate_proj",
    "feed_forward.experts.*.up": "feed_forward.experts.*.up_proj",
    "feed_forward.experts.*.down": "feed_forward.experts.*.down_proj",
    "feed_forward.shared.gate": "feed_forward.shared_expert.gate_proj",
    "feed_forward.shared.up": "feed_forward.shared_expert.up_proj",
    "feed_forward.shared.down": "feed_forward.shared_expert.down_proj",
}
_FULL_EVERY = 4


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=8192,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    # The rope, whose parameters transformers reads in a way of its own, is left out: it changes no size.
    full = GQA(dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.head_dim**-0.5)
    # A chunk is no window, but at its end it holds as many tokens.
    chunked = replace(full, window=hf.integer("attention_chunk_size", 8192))
    expert = Dense(dims.intermediate_size, hf.activation("hidden_act", "silu"))
    dense = replace(expert, intermediate_size=hf.integer("intermediate_size_mlp", 16384))
    routing = Routing(
        hf.integer("num_local_experts", 16), hf.integer("num_experts_per_tok", 1), scoring="sigmoid", normalized=False
    )
    moe, step = MoE(routing, expert, shared=expert), hf.integer("interleave_moe_layer_step", 1)
    kinds = {
        (has_experts, is_full): pre_norm_layer(full if is_full else chunked, moe if has_experts else dense, norm)
        for has_experts in (False, True)
        for is_full in (False, True)
    }
    layers = tuple(kinds[(index + 1) % step == 0, (index + 1) % _FULL_EVERY == 0] for index in range(dims.num_layers))
    return DecoderSpec(
        model_type="llama4_text",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=layers,
        final_norm=norm,
        max_position_embeddings=dims.max_position_embeddings,
        dtype=hf.dtype(),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, _LAYER_KEYS)
