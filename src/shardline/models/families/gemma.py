"""Gemma 1: Llama with scaled embeddings, norms that add one to their weight, and a tanh GELU."""

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
        vocab_size=256000,
        hidden_size=3072,
        intermediate_size=24576,
        num_layers=28,
        num_heads=16,
        num_kv_heads=16,
        head_dim=256,
        max_position_embeddings=8192,
    )
    hf.only("use_bidirectional_attention", False)
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6), weight_offset=1.0)
    bias = hf.flag("attention_bias", False)
    activation = read_activation(hf, "hidden_act", "gelu_pytorch_tanh")
    layer = pre_norm_layer(
        replace(attention(dims, rope.build(max_model_len)), qkv_bias=bias, output_bias=bias),
        # The first releases say "gelu" and mean its tanh form.
        Dense(dims.intermediate_size, "gelu_tanh" if activation == "gelu" else activation),
        norm,
    )
    return DecoderSpec(
        model_type="gemma",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(layer,) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        embedding_scale=dims.hidden_size**0.5,
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
