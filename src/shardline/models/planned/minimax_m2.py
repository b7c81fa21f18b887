"""MiniMax-M2: grouped-query attention with norms of q and k, and sigmoid routing with a bias for choosing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.hf_config import HFConfig, read_dims
from shardline.models.llama_layout import MOE_LAYER_KEYS, attention, llama_source, pre_norm_layer
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, MoE, Norm, Routing, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
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
        intermediate_size=1536,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, partial=True)
    routing = Routing(
        hf.integer("num_local_experts", 256),
        hf.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalized=True,
        correction_bias=hf.flag("use_routing_bias", True),
    )
    moe = MoE(routing, Dense(dims.intermediate_size, hf.activation("hidden_act", "silu")))
    # The real norms of q and k have a weight for every head; as in all families here, the spec has one head's.
    layer = pre_norm_layer(replace(attention(dims, rope.build(max_model_len)), qk_norm=norm), moe, norm)
    return DecoderSpec(
        model_type="minimax_m2",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(layer,) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=hf.dtype(),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, _LAYER_KEYS)
