"""Qwen 3 MoE: Qwen 3 with experts in some layers, and no shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS, attention, llama_source, pre_norm_layer
from shardline.models.moe_config import read_routing, sparse_layers
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, MoE, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=24,
        num_heads=32,
        num_kv_heads=4,
        head_dim=None,
        max_position_embeddings=32768,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    bias = hf.flag("attention_bias", False)
    window = hf.optional_integer("sliding_window", 4096) if hf.flag("use_sliding_window", False) else None
    gqa = replace(
        attention(dims, rope.build(max_model_len), window=window), qk_norm=norm, qkv_bias=bias, output_bias=bias
    )
    activation = read_activation(hf, "hidden_act", "silu")
    moe = MoE(
        read_routing(hf, num_experts=128, experts_per_token=8, normalized=hf.flag("norm_topk_prob", False)),
        Dense(hf.integer("moe_intermediate_size", 768), activation),
    )
    sparse, dense = pre_norm_layer(gqa, moe, norm), pre_norm_layer(gqa, Dense(dims.intermediate_size, activation), norm)
    return DecoderSpec(
        model_type="qwen3_moe",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(sparse if has_experts else dense for has_experts in sparse_layers(hf, dims.num_layers)),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, MOE_LAYER_KEYS)
