"""Qwen 2 MoE: Qwen 2 with experts in some layers, and a shared expert with a gate for every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import Dims, layer_windows, read_activation, read_dims, read_dtype
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
        intermediate_size=5632,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=None,
        max_position_embeddings=32768,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    full = replace(attention(dims, rope.build(max_model_len)), qkv_bias=hf.flag("qkv_bias", True))
    activation = read_activation(hf, "hidden_act", "silu")
    dense = Dense(dims.intermediate_size, activation)
    moe = MoE(
        read_routing(hf, num_experts=60, experts_per_token=4, normalized=hf.flag("norm_topk_prob", False)),
        Dense(hf.integer("moe_intermediate_size", 1408), activation),
        shared=Dense(hf.integer("shared_expert_intermediate_size", 5632), activation),
        shared_gate=True,
    )
    return DecoderSpec(
        model_type="qwen2_moe",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(
            pre_norm_layer(replace(full, window=window), moe if sparse else dense, norm)
            for window, sparse in zip(_windows(hf, dims), sparse_layers(hf, dims.num_layers), strict=True)
        ),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def _windows(hf: HFConfig, dims: Dims) -> list[int | None]:
    """The window of each layer. Without `layer_types`, every other layer below max_window_layers has a window."""
    switched_on = hf.flag("use_sliding_window", False)
    window = hf.optional_integer("sliding_window", 4096) if switched_on else None
    num_windowed = hf.integer("max_window_layers", 28, minimum=0) if switched_on else 0
    default_types = [
        "sliding_attention" if index % 2 == 0 and index < num_windowed else "full_attention"
        for index in range(dims.num_layers)
    ]
    return layer_windows(hf, dims.num_layers, window, default_types)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, MOE_LAYER_KEYS)
