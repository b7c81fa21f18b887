"""OLMo 2: Llama with norms after each block instead of before it, and norms over all heads of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import Dims, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source
from shardline.models.post_norm_layout import POST_NORM_LAYER_KEYS, post_norm_layer
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, Norm, Rope, TensorSource


def read_olmo_dims(hf: HFConfig) -> Dims:
    """The sizes of OLMo 2 and 3."""
    return read_dims(
        hf,
        vocab_size=50304,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=None,
        head_dim=None,
        max_position_embeddings=2048,
    )


def olmo_layer(hf: HFConfig, dims: Dims, norm: Norm, rope: Rope, window: int | None = None) -> Layer:
    """A layer of OLMo 2 or 3."""
    bias = hf.flag("attention_bias", False)
    gqa = attention(dims, rope, window=window)
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    return post_norm_layer(
        replace(gqa, qkv_bias=bias, output_bias=bias, qk_norm=norm, norms_all_heads=True), dense, norm
    )


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_olmo_dims(hf)
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5), rounds_once=True)
    return DecoderSpec(
        model_type="olmo2",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(olmo_layer(hf, dims, norm, rope.build(max_model_len)),) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, POST_NORM_LAYER_KEYS)
