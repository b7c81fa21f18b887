"""Gemma 4: windowed layers; full layers with wider heads, whose values may be their keys; experts beside a dense block.

The small models, with embeddings per layer and layers that share keys and values, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.hf_config import Dims, HFConfig, read_dims
from shardline.models.llama_layout import FOUR_NORM_LAYER_KEYS, MOE_LAYER_KEYS, llama_source, windowed_layers
from shardline.models.parameters import parse_name
from shardline.models.rope import proportional_rope, read_rope
from shardline.models.spec import GQA, DecoderSpec, Dense, Layer, MoE, Norm, Rope, Routing, TensorSource
from shardline.models.stacked_experts import stacked_expert_source

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    **FOUR_NORM_LAYER_KEYS,
    "feed_forward.router": "router.proj",
    "feed_forward.experts_norm": "pre_feedforward_layernorm_2",
    "feed_forward.experts_output_norm": "post_feedforward_layernorm_2",
    "feed_forward.shared_output_norm": "post_feedforward_layernorm_1",
    "feed_forward.shared.gate": "mlp.gate_proj",
    "feed_forward.shared.up": "mlp.up_proj",
    "feed_forward.shared.down": "mlp.down_proj",
}
_NUMBER_KEYS: Mapping[str, str] = {
    "output_scale": "layer_scalar",
    "feed_forward.expert_scale": "router.per_expert_scale",
    "feed_forward.router_norm": "router.scale",
}
"""Parts whose tensors have no further name."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=262144,
        hidden_size=2304,
        intermediate_size=9216,
        num_layers=30,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
    )
    for key, default, part in (
        ("hidden_size_per_layer_input", 256, "embeddings per layer"),
        ("num_kv_shared_layers", 0, "layers that share keys and values"),
    ):
        if hf.integer(key, default, minimum=0):
            raise hf.error(key, f"is not supported: the engine has no {part}")
    hf.only("use_bidirectional_attention", "vision")
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6), rounds_once=True)
    window_rope = read_rope(
        hf,
        dims.head_dim,
        dims.max_position_embeddings,
        section=hf.section("rope_parameters").section("sliding_attention"),
    ).build(max_model_len)
    windowed = _attention(hf, dims, norm, window_rope)
    full = _full_attention(hf, dims, windowed)
    dense = Dense(dims.intermediate_size, hf.activation("hidden_activation", "gelu_pytorch_tanh"))
    feed_forward = _experts(hf, dims, dense, norm) if hf.flag("enable_moe_block", False) else dense
    default_types = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(dims.num_layers)]
    windows = hf.layer_windows(dims.num_layers, hf.optional_integer("sliding_window", 512), default_types)
    windows[-1] = None

    def layer(window: int | None) -> Layer:
        own = full if window is None else replace(windowed, window=window)
        return Layer(own, feed_forward, norm, norm, norm, norm, output_scale=True)

    return DecoderSpec(
        model_type="gemma4_text",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(windows, layer),
        final_norm=norm,
        max_position_embeddings=dims.max_position_embeddings,
        dtype=hf.dtype(),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        embedding_scale=dims.hidden_size**0.5,
        logits_softcap=hf.optional_number("final_logit_softcapping", None),
    )


def _attention(hf: HFConfig, dims: Dims, norm: Norm, rope: Rope) -> GQA:
    bias = hf.flag("attention_bias", False)
    gqa = GQA(dims.num_heads, dims.num_kv_heads, dims.head_dim, 1.0, rope=rope, qkv_bias=bias, output_bias=bias)
    return replace(gqa, qk_norm=norm, value_norm=norm)


def _full_attention(hf: HFConfig, dims: Dims, windowed: GQA) -> GQA:
    """Attention of the layers without a window. Newer files state its sizes for each of these layers."""
    is_key = hf.flag("attention_k_eq_v", False)
    num_kv_heads = dims.num_kv_heads
    if hf.has("per_layer_config"):
        layers = [value for value in hf.section("per_layer_config").values.values() if isinstance(value, Mapping)]
        sizes = HFConfig(layers[0] if layers else {}, "per_layer_config.")
        head_dim = sizes.integer("head_dim", dims.head_dim)
        num_kv_heads = sizes.integer("num_key_value_heads", num_kv_heads)
    else:
        head_dim = hf.integer("global_head_dim", 512)
        num_kv_heads = hf.integer("num_global_key_value_heads", num_kv_heads) if is_key else num_kv_heads
    if dims.num_heads % num_kv_heads:
        raise hf.error("num_global_key_value_heads", f"must divide num_attention_heads ({dims.num_heads})")
    section = hf.section("rope_parameters").section("full_attention")
    if section.text("rope_type", "proportional") != "proportional":
        raise section.error("rope_type", "must be proportional")
    rope = proportional_rope(section, head_dim, default_theta=1e6, default_fraction=0.25)
    return replace(windowed, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope, value_is_key=is_key)


def _experts(hf: HFConfig, dims: Dims, dense: Dense, norm: Norm) -> MoE:
    routing = Routing(
        hf.integer("num_experts"),
        hf.integer("top_k_experts"),
        logits_scale=dims.hidden_size**-0.5,
        expert_scale=True,
    )
    expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size"))
    return MoE(routing, expert, shared=dense, own_norms=norm)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, _ = parse_name(name)
    if part in _NUMBER_KEYS:
        return TensorSource(f"model.layers.{layer}.{_NUMBER_KEYS[part]}")
    return stacked_expert_source(name, spec, "experts", transposed=False) or llama_source(name, _LAYER_KEYS)
