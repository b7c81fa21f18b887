"""Seed-OSS: Llama with biases of q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, pre_norm_layer
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=155136,
        hidden_size=4096,
        intermediate_size=27648,
        num_layers=64,
        num_heads=80,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=524288,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    gqa = replace(
        attention(dims, rope.build(max_model_len)),
        qkv_bias=hf.flag("attention_bias", True),
        output_bias=hf.flag("attention_out_bias", False),
    )
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"), bias=hf.flag("mlp_bias", False))
    return DecoderSpec(
        model_type="seed_oss",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(pre_norm_layer(gqa, dense, norm),) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
