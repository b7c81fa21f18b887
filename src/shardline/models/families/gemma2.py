"""Gemma 2: Gemma with soft-caps, four norms a layer, and a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import FOUR_NORM_LAYER_KEYS, attention, llama_source, windowed_layers
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=256000,
        hidden_size=2304,
        intermediate_size=9216,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
    )
    hf.only("use_bidirectional_attention", False)
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6), weight_offset=1.0)
    bias = hf.flag("attention_bias", False)
    full = replace(
        attention(dims, rope.build(max_model_len), scale=hf.number("query_pre_attn_scalar", 256) ** -0.5),
        softcap=hf.optional_number("attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_activation", "gelu_pytorch_tanh"))
    default_types = [("sliding_attention", "full_attention")[index % 2] for index in range(dims.num_layers)]
    windows = layer_windows(hf, dims.num_layers, hf.optional_integer("sliding_window", 4096), default_types)
    return DecoderSpec(
        model_type="gemma2",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(
            windows, lambda window: Layer(replace(full, window=window), dense, norm, norm, norm, norm)
        ),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        embedding_scale=dims.hidden_size**0.5,
        logits_softcap=hf.optional_number("final_logit_softcapping", 30.0),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, FOUR_NORM_LAYER_KEYS)
