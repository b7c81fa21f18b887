"""DeepSeek V3 and R1: latent attention, and sigmoid routing by groups with a learned bias for choosing experts."""

from __future__ import annotations

from shardline.models.config_fields import Defaults
from shardline.models.deepseek_like import DEEPSEEK_LAYER_KEYS, deepseek_like, group_routing
from shardline.models.heads import LAYER_LAYOUT
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import checkpoint_keys
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=129280, hidden=7168, intermediate=18432, layers=61, heads=128, positions=4096)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layer for multi-token prediction is a head of its own."""
    hf.only("topk_method", "noaux_tc")
    hf.only("scoring_func", "sigmoid")
    return deepseek_like(
        hf,
        max_model_len,
        _DEFAULTS,
        group_routing(hf, num_experts=256, chosen=8, scale=2.5, groups=(8, 4)),
        first_dense=3,
        expert_size=2048,
        num_shared=1,
        interleaved=hf.flag("rope_interleave", True),
    )


tensor_source = checkpoint_keys(DEEPSEEK_LAYER_KEYS)
PREDICTOR = LAYER_LAYOUT
