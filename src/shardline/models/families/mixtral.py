"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import LAYER_KEYS, attention, llama_source, pre_norm_layer
from shardline.models.moe_config import read_routing
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, MoE, Norm, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **LAYER_KEYS,
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.experts.*.gate": "block_sparse_moe.experts.*.w1",
    "feed_forward.experts.*.up": "block_sparse_moe.experts.*.w3",
    "feed_forward.experts.*.down": "block_sparse_moe.experts.*.w2",
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=None,
        max_position_embeddings=131072,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=1e6)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    window = hf.optional_integer("sliding_window", None)
    moe = MoE(
        read_routing(hf, num_experts=8, experts_per_token=2, normalized=True),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
    )
    layer = pre_norm_layer(attention(dims, rope.build(max_model_len), window=window), moe, norm)
    return DecoderSpec(
        model_type="mixtral",
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
    return llama_source(name, _LAYER_KEYS)
