"""gpt-oss: attention sinks, biased projections, a window in every other layer, and experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, full_every, read_routing
from shardline.models.feed_forward import Dense, MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, StackedExperts, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "attention.sinks.bias": "self_attn.sinks",
    "feed_forward.router": "mlp.router",
    "feed_forward.router_logits": "mlp.router",
}
_DEFAULTS = Defaults(
    vocab=201088, hidden=2880, intermediate=2880, layers=36, heads=64, kv_heads=8, head_dim=64, positions=131072
)
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("hidden_act", "silu")
    hf.only("swiglu_limit", 7.0)
    hf.only("swiglu_alpha", 1.702)
    if not hf.has("rope_scaling") and not hf.has("rope_parameters"):
        hf = hf.with_values(rope_parameters=_DEFAULT_ROPE)
    norm = Norm("rms", 1e-5, rounds_once=True)
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=norm, theta=150_000.0)
    bias = hf.flag("attention_bias", True)
    gqa = llama.attention.changed(qkv_bias=bias, output_bias=bias, sinks=True)
    routing = replace(read_routing(hf, num_experts=128, experts_per_token=4, normalized=True), logits_bias=True)
    moe = MoE(routing, Dense(llama.dims.intermediate_size, "clamped_swish", bias=True))

    layers = llama.by_window(
        lambda window: llama.layer(gqa.changed(window=window), moe),
        hf.optional_integer("sliding_window", 128),
        full_every(2, llama.dims.num_layers),
    )
    return llama.spec(layers)


tensor_source = checkpoint_keys(_LAYER_KEYS, stacked=StackedExperts("mlp.experts", alternating=True))
