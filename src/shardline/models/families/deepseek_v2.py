"""DeepSeek V2 and V2-Lite: latent attention and softmax routing. V2 routes only to the best groups of experts."""

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
from shardline.models.spec import DecoderSpec, Dense, Routing, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_deepseek_dims(
        hf,
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        max_position_embeddings=2048,
    )
    hf.only("norm_topk_prob", False)
    hf.only("scoring_func", "softmax")
    attention, max_length = latent_attention(hf, dims, max_model_len, interleaved=True)
    bias = hf.flag("mlp_bias", False)
    return deepseek_spec(
        hf,
        dims,
        attention,
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"), bias=bias),
        mixture(hf, _routing(hf), expert_size=1407, num_shared=2, shared_bias=bias),
        first_dense=hf.integer("first_k_dense_replace", 0, minimum=0),
        max_position_embeddings=max_length,
    )


def _routing(hf: HFConfig) -> Routing:
    hf.only("topk_method", "greedy", "group_limited_greedy")
    limited = hf.text("topk_method", "greedy") == "group_limited_greedy"
    return Routing(
        num_experts=hf.integer("n_routed_experts", 64),
        experts_per_token=hf.integer("num_experts_per_tok"),
        normalized=False,
        scale=hf.number("routed_scaling_factor", 1.0),
        num_groups=hf.integer("n_group") if limited else 1,
        top_groups=hf.integer("topk_group") if limited else 1,
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, DEEPSEEK_LAYER_KEYS)
