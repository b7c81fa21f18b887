"""Llama 1 to 3, and the many models that ship as model_type "llama"."""

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
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=None,
        head_dim=None,
        max_position_embeddings=2048,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    bias = hf.flag("attention_bias", False)
    layer = pre_norm_layer(
        replace(attention(dims, rope.build(max_model_len)), qkv_bias=bias, output_bias=bias),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"), bias=hf.flag("mlp_bias", False)),
        norm,
    )
    return DecoderSpec(
        model_type="llama",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(layer,) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
