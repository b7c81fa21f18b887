"""MiniMax-M2: norms over all heads of q and k, and sigmoid routing with a bias for choosing experts."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, read_dims, read_routing
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MIXTRAL_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_LAYER_KEYS: Mapping[str, str] = {
    **MIXTRAL_LAYER_KEYS,
    "feed_forward.router.bias": "block_sparse_moe.e_score_correction_bias",
}
_DEFAULTS = Defaults(
    vocab=200064, hidden=3072, intermediate=1536, layers=62, heads=48, kv_heads=8, head_dim=128, positions=196608
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf.only("scoring_func", "sigmoid")
    hf.only("use_qk_norm", True)
    hf.only("qk_norm_type", "per_layer")
    hf.only("use_routing_bias", True)
    hf.only("shared_intermediate_size", 0)
    if hf.has("rotary_dim") and not hf.has("partial_rotary_factor"):
        hf = hf.with_values(partial_rotary_factor=hf.integer("rotary_dim") / read_dims(hf, _DEFAULTS).head_dim)
    llama = llama_like(hf, max_model_len, _DEFAULTS, theta=5e6, partial=True)
    routing = read_routing(hf, num_experts=256, experts_per_token=8, normalized=True)
    moe = MoE(replace(routing, scoring="sigmoid", correction_bias=True), llama.dense)
    return llama.spec(llama.layer(llama.attention.changed(qk_norm=llama.norm, norms_all_heads=True), moe))


tensor_source = checkpoint_keys(_LAYER_KEYS)
