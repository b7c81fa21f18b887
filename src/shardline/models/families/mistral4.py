"""Mistral 4: DeepSeek's latent attention, whose queries grow with their position, and softmax routing by groups."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults
from shardline.models.deepseek_like import DEEPSEEK_LAYER_KEYS, deepseek_like, group_routing
from shardline.models.families.ministral3 import DEFAULT_ROPE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import StackedExperts, checkpoint_keys
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=131072, hidden=4096, intermediate=12288, layers=36, heads=32, positions=1048576)
_DEFAULT_RANKS = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
_DEFAULT_ROPE = {
    **DEFAULT_ROPE,
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The rope's parameters are those of the rotated part of a head alone."""
    rope = hf.section("rope_scaling" if hf.has("rope_scaling") else "rope_parameters").values or _DEFAULT_ROPE
    own = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    hf = hf.with_values(defaults=_DEFAULT_RANKS, rope_scaling=None, rope_parameters=own)
    routing = group_routing(hf, num_experts=128, chosen=4, scale=1.0)
    return deepseek_like(
        hf,
        max_model_len,
        _DEFAULTS,
        replace(routing, scoring="softmax", correction_bias=False),
        first_dense=0,
        expert_size=2048,
        num_shared=1,
        interleaved=hf.flag("rope_interleave", True),
        scales_queries=True,
    )


tensor_source = checkpoint_keys(DEEPSEEK_LAYER_KEYS, stacked=StackedExperts("mlp.experts", transposed=False))
