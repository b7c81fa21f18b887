"""Qwen3.5 with experts and a gated shared one in all layers; all experts of a layer are in two tensors."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, read_routing
from shardline.models.families.qwen3_5_text import hybrid_keys, hybrid_spec, read_llama
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, StackedExperts, checkpoint_keys
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(
    vocab=248320, hidden=2048, intermediate=512, layers=40, heads=16, kv_heads=2, head_dim=256, positions=32768
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layer for multi-token prediction is left out."""
    llama = read_llama(hf, max_model_len, _DEFAULTS)
    expert = replace(llama.dense, intermediate_size=hf.integer("moe_intermediate_size", 512))
    shared = replace(expert, intermediate_size=hf.integer("shared_expert_intermediate_size", 512))
    routing = read_routing(hf, num_experts=256, experts_per_token=8, normalized=True)
    return hybrid_spec(llama, MoE(routing, expert, shared=shared, shared_gate=True))


tensor_source = hybrid_keys(checkpoint_keys(MOE_LAYER_KEYS, stacked=StackedExperts("mlp.experts", transposed=False)))
