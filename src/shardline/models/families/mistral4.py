"""Mistral 4: DeepSeek's latent attention, whose queries grow with their position, and softmax routing by groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation
from shardline.models.deepseek_layout import (
    DEEPSEEK_LAYER_KEYS,
    deepseek_spec,
    latent_attention,
    mixture,
    read_deepseek_dims,
)
from shardline.models.families.ministral3 import read_query_scale
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import llama_source
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Routing, TensorSource
from shardline.models.stacked_experts import stacked_expert_source

_DEFAULTS = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = _with_rope({**_DEFAULTS, **config})
    dims = read_deepseek_dims(
        hf,
        vocab_size=131072,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        max_position_embeddings=1048576,
    )
    routing = Routing(
        num_experts=hf.integer("n_routed_experts", 128),
        experts_per_token=hf.integer("num_experts_per_tok", 4),
        normalized=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        num_groups=hf.integer("n_group", 1),
        top_groups=hf.integer("topk_group", 1),
        group_score="top2_sum",
    )
    attention, max_length = latent_attention(hf, dims, max_model_len, hf.flag("rope_interleave", True))
    rope = read_rope(hf, attention.rope_head_dim, dims.max_position_embeddings)
    return deepseek_spec(
        hf,
        dims,
        replace(attention, query_scale=read_query_scale(rope)),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
        mixture(hf, routing, expert_size=2048, num_shared=1),
        first_dense=hf.integer("first_k_dense_replace", 0, minimum=0),
        max_position_embeddings=max_length,
    )


def _with_rope(config: Mapping[str, Any]) -> HFConfig:
    """The configuration with rope parameters of the rotated part of a head alone."""
    hf = HFConfig(config)
    section = hf.section("rope_scaling" if hf.has("rope_scaling") else "rope_parameters").values or _DEFAULT_ROPE
    own = {key: value for key, value in section.items() if key != "partial_rotary_factor"}
    return HFConfig({**config, "rope_scaling": None, "rope_parameters": own})


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    stacked = stacked_expert_source(name, spec, "mlp.experts", transposed=False)
    return stacked or llama_source(name, DEEPSEEK_LAYER_KEYS)
