"""DeepSeek V3 and R1: latent attention, and sigmoid routing by groups with a learned bias for choosing experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.config_fields import read_activation
from shardline.models.deepseek_layout import (
    DEEPSEEK_LAYER_KEYS,
    deepseek_spec,
    latent_attention,
    mixture,
    read_deepseek_dims,
)
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import llama_source
from shardline.models.parameters import parse_name
from shardline.models.spec import DecoderSpec, Dense, Routing, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf = HFConfig(config)
    dims = read_deepseek_dims(
        hf,
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=61,
        num_heads=128,
        max_position_embeddings=4096,
    )
    hf.only("topk_method", "noaux_tc")
    hf.only("scoring_func", "sigmoid")
    routing = Routing(
        num_experts=hf.integer("n_routed_experts", 256),
        experts_per_token=hf.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalized=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 2.5),
        num_groups=hf.integer("n_group", 8),
        top_groups=hf.integer("topk_group", 4),
        group_score="top2_sum",
        correction_bias=True,
    )
    attention, max_length = latent_attention(hf, dims, max_model_len, hf.flag("rope_interleave", True))
    return deepseek_spec(
        hf,
        dims,
        attention,
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
        mixture(hf, routing, expert_size=2048, num_shared=1),
        first_dense=hf.integer("first_k_dense_replace", 3, minimum=0),
        max_position_embeddings=max_length,
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part == "feed_forward.router" and kind == "bias":
        return TensorSource(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
    return llama_source(name, DEEPSEEK_LAYER_KEYS)
