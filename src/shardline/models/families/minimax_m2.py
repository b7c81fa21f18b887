"""MiniMax-M2: norms over all heads of q and k, and sigmoid routing with a bias for choosing experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS, attention, llama_source, pre_norm_layer
from shardline.models.moe_config import read_routing
from shardline.models.parameters import parse_name
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, MoE, Norm, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.experts.*.gate": "block_sparse_moe.experts.*.w1",
    "feed_forward.experts.*.up": "block_sparse_moe.experts.*.w3",
    "feed_forward.experts.*.down": "block_sparse_moe.experts.*.w2",
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_layers=62,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=196608,
    )
    hf.only("scoring_func", "sigmoid")
    hf.only("use_qk_norm", True)
    hf.only("qk_norm_type", "per_layer")
    hf.only("use_routing_bias", True)
    hf.only("shared_intermediate_size", 0)
    if hf.has("rotary_dim") and not hf.has("partial_rotary_factor"):
        hf = HFConfig({**config, "partial_rotary_factor": hf.integer("rotary_dim") / dims.head_dim})
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=5e6, partial=True)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    gqa = replace(attention(dims, rope.build(max_model_len)), qk_norm=norm, norms_all_heads=True)
    routing = read_routing(hf, num_experts=256, experts_per_token=8, normalized=True)
    moe = MoE(
        replace(routing, scoring="sigmoid", correction_bias=True),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
    )
    return DecoderSpec(
        model_type="minimax_m2",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(pre_norm_layer(gqa, moe, norm),) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part == "feed_forward.router" and kind == "bias":
        return TensorSource(f"model.layers.{layer}.block_sparse_moe.e_score_correction_bias")
    return llama_source(name, _LAYER_KEYS)
