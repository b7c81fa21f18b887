"""Ministral 3: Mistral whose queries grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, pre_norm_layer
from shardline.models.rope import RopeConfig, read_rope
from shardline.models.spec import DecoderSpec, Dense, Norm, QueryScale, TensorSource

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_query_scale(rope: RopeConfig) -> QueryScale:
    """The factor of queries, from the rope's parameters."""
    return QueryScale(rope.section.number("llama_4_scaling_beta"), rope.original_max_position_embeddings)


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=131072,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=34,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
    )
    if not hf.has("rope_scaling") and not hf.has("rope_parameters"):
        hf = HFConfig({**config, "rope_parameters": _DEFAULT_ROPE})
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    gqa = attention(dims, rope.build(max_model_len), window=hf.optional_integer("sliding_window", None))
    layer = pre_norm_layer(
        replace(gqa, query_scale=read_query_scale(rope)),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
        norm,
    )
    return DecoderSpec(
        model_type="ministral3",
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
