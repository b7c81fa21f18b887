"""DeepSeek V2 and V2-Lite: latent attention and softmax routing. V2 routes only to the best groups of experts."""

from __future__ import annotations

from shardline.models.config_fields import Defaults
from shardline.models.deepseek_like import DEEPSEEK_LAYER_KEYS, deepseek_like
from shardline.models.feed_forward import Routing
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import checkpoint_keys
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=102400, hidden=4096, intermediate=11008, layers=32, heads=32, positions=2048)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("norm_topk_prob", False)
    hf.only("scoring_func", "softmax")
    return deepseek_like(
        hf,
        max_model_len,
        _DEFAULTS,
        _routing(hf),
        first_dense=0,
        expert_size=1407,
        num_shared=2,
        interleaved=True,
        bias=hf.flag("mlp_bias", False),
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


tensor_source = checkpoint_keys(DEEPSEEK_LAYER_KEYS)
