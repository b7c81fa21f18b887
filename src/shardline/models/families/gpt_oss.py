"""gpt-oss: attention sinks, biased projections, a window in every other layer, and experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import layer_windows, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS, attention, llama_source, pre_norm_layer, windowed_layers
from shardline.models.moe_config import read_routing
from shardline.models.parameters import parse_name
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, MoE, Norm, TensorSource
from shardline.models.stacked_experts import stacked_expert_source

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "mlp.router",
    "feed_forward.router_logits": "mlp.router",
}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=36,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
    )
    hf.only("hidden_act", "silu")
    hf.only("swiglu_limit", 7.0)
    hf.only("swiglu_alpha", 1.702)
    if not hf.has("rope_scaling") and not hf.has("rope_parameters"):
        hf = HFConfig({**config, "rope_parameters": _DEFAULT_ROPE})
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=150_000.0)
    norm, bias = Norm("rms", hf.number("rms_norm_eps", 1e-5), rounds_once=True), hf.flag("attention_bias", True)
    full = replace(attention(dims, rope.build(max_model_len)), qkv_bias=bias, output_bias=bias, sinks=True)
    routing = replace(read_routing(hf, num_experts=128, experts_per_token=4, normalized=True), logits_bias=True)
    moe = MoE(routing, Dense(dims.intermediate_size, "clamped_swish", bias=True))
    default_types = [("sliding_attention", "full_attention")[index % 2] for index in range(dims.num_layers)]
    windows = layer_windows(hf, dims.num_layers, hf.optional_integer("sliding_window", 128), default_types)
    return DecoderSpec(
        model_type="gpt_oss",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(windows, lambda window: pre_norm_layer(replace(full, window=window), moe, norm)),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, _ = parse_name(name)
    if part == "attention.sinks":
        return TensorSource(f"model.layers.{layer}.self_attn.sinks")
    return stacked_expert_source(name, spec, "mlp.experts", alternating=True) or llama_source(name, _LAYER_KEYS)
