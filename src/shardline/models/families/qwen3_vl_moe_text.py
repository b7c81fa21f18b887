"""The text model of Qwen3-VL with experts: Qwen3-MoE, with all experts of a layer in two tensors."""

from __future__ import annotations

from shardline.models.families import qwen3_moe
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, StackedExperts, checkpoint_keys
from shardline.models.spec import DecoderSpec

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


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The chosen experts' weights always add up to one."""
    return qwen3_moe.decoder_spec(hf.with_values(defaults=_DEFAULTS, norm_topk_prob=True), max_model_len)


tensor_source = checkpoint_keys(MOE_LAYER_KEYS, stacked=StackedExperts("mlp.experts"))
