"""GLM-4 (0414): four norms a layer, gate and up in one tensor, and rope on neighbouring elements of half a head."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import FOUR_NORM_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_LAYER_KEYS: Mapping[str, str] = {
    **FOUR_NORM_LAYER_KEYS,
    "post_attention_norm": "post_self_attn_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "post_feed_forward_norm": "post_mlp_layernorm",
}
_DEFAULTS = Defaults(
    vocab=151552, hidden=4096, intermediate=13696, layers=40, heads=32, kv_heads=2, head_dim=128, positions=131072
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = hf.with_values(defaults={"partial_rotary_factor": 0.5})
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1.5625e-7), partial=True, interleaved=True)
    return llama.spec(llama.four_norm_layer(llama.attention.changed(qkv_bias=hf.flag("attention_bias", True))))


tensor_source = checkpoint_keys(_LAYER_KEYS, fused={"mlp.gate_up_proj": ("feed_forward.gate", "feed_forward.up")})
