"""The text model of Qwen3-VL with experts: Qwen3-MoE, with all experts of a layer in two tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.families import qwen3_moe
from shardline.models.llama_layout import MOE_LAYER_KEYS, llama_source
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.models.stacked_experts import stacked_expert_source

_DEFAULTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The chosen experts' weights always add up to one."""
    given = {"model_type": "qwen3_moe", "norm_topk_prob": True}
    spec = qwen3_moe.decoder_spec({**_DEFAULTS, **config, **given}, max_model_len)
    return replace(spec, model_type="qwen3_vl_moe_text")


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return stacked_expert_source(name, spec, "mlp.experts") or llama_source(name, MOE_LAYER_KEYS)
