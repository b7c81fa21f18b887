"""ERNIE 4.5: Llama with rope on neighbouring elements."""

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
        vocab_size=103424,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=18,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=500_000.0)
    norm, bias = Norm("rms", hf.number("rms_norm_eps", 1e-5)), hf.flag("use_bias", False)
    gqa = attention(dims, replace(rope.build(max_model_len), interleaved=True))
    layer = pre_norm_layer(
        replace(gqa, qkv_bias=bias, output_bias=bias),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"), bias=bias),
        norm,
    )
    return DecoderSpec(
        model_type="ernie4_5",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(layer,) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
