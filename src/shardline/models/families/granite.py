"""Granite: Llama with factors of the embedding, of each block's output and of the scores, and divided logits."""

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
    norm, bias = Norm("rms", hf.number("rms_norm_eps", 1e-6)), hf.flag("attention_bias", False)
    gqa = attention(dims, rope.build(max_model_len), scale=hf.number("attention_multiplier", 1.0))
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"), bias=hf.flag("mlp_bias", False))
    layer = pre_norm_layer(replace(gqa, qkv_bias=bias, output_bias=bias), dense, norm)
    return DecoderSpec(
        model_type="granite",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(replace(layer, residual_scale=hf.number("residual_multiplier", 1.0)),) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        logits_scale=1 / hf.number("logits_scaling", 1.0),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
