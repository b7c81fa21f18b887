"""MiMo-V2-Flash: windowed and full attention with sinks, smaller value heads, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import layer_flags, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS, llama_source, pre_norm_layer
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, MoE, Norm, PlannedGQA, Routing, TensorSource

_LAYER_KEYS: Mapping[str, str] = {**MOE_LAYER_KEYS, "attention.sinks": "self_attn.attention_sink"}

REFUSAL = "its values have another head size than its keys, which the engine does not support"
"""Why the engine cannot load the model type."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=152576,
        hidden_size=4096,
        intermediate_size=16384,
        num_layers=48,
        num_heads=64,
        num_kv_heads=4,
        head_dim=192,
        max_position_embeddings=262144,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, partial=True)
    norm = Norm("rms", hf.number("layernorm_epsilon", 1e-5))
    full = PlannedGQA(
        dims.num_heads,
        dims.num_kv_heads,
        dims.head_dim,
        dims.head_dim**-0.5,
        rope=rope.build(max_model_len),
        sinks=hf.flag("add_full_attention_sink_bias", False),
        value_size=hf.integer("v_head_dim", 128),
    )
    windowed = replace(
        full,
        num_heads=hf.integer("swa_num_attention_heads", dims.num_heads),
        num_kv_heads=hf.integer("swa_num_key_value_heads", dims.num_kv_heads),
        head_dim=hf.integer("swa_head_dim", dims.head_dim),
        window=hf.integer("sliding_window", 128),
        sinks=hf.flag("add_swa_attention_sink_bias", True),
        value_size=hf.integer("swa_v_head_dim", 128),
    )
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    routing = Routing(
        hf.integer("n_routed_experts", 256),
        hf.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalized=hf.flag("norm_topk_prob", True),
        correction_bias=True,
    )
    moe = MoE(routing, replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 2048)))
    has_window = layer_flags(hf, "hybrid_layer_pattern", dims.num_layers)
    kinds = list(zip(has_window, layer_flags(hf, "moe_layer_freq", dims.num_layers), strict=True))
    made: dict[tuple[bool, bool], Layer] = {
        kind: pre_norm_layer(windowed if kind[0] else full, moe if kind[1] else dense, norm) for kind in set(kinds)
    }
    return DecoderSpec(
        model_type="mimo_v2_flash",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(made[kind] for kind in kinds),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, _LAYER_KEYS)
