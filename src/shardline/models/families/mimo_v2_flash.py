"""MiMo-V2-Flash: windowed layers with sinks between full ones, values of another size than keys, and experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, layer_flags, layer_types, read_dims
from shardline.models.deepseek_like import group_routing
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.rope import read_rope, rope_sections
from shardline.models.spec import DecoderSpec, Layer

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "attention.sinks.bias": "self_attn.attention_sink_bias",
    "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
}
_DEFAULTS = Defaults(
    vocab=152576, hidden=4096, intermediate=16384, layers=48, heads=64, kv_heads=4, head_dim=192, positions=131072
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. Files of the publisher and of transformers have other keys. The layers for multi-token
    prediction are left out."""
    hf = hf.with_values(defaults={"partial_rotary_factor": 0.334})
    dims, (full_rope, windowed_rope) = read_dims(hf, _DEFAULTS), rope_sections(hf)
    windowed_rope = windowed_rope.with_values(defaults={"rope_theta": hf.number("swa_rope_theta", 10_000.0)})
    length = dims.max_position_embeddings
    llama = llama_like(
        hf,
        max_model_len,
        _DEFAULTS,
        norm=Norm("rms", 1e-5),
        eps_key="layernorm_epsilon" if hf.has("layernorm_epsilon") else "rms_norm_eps",
        rope=read_rope(hf, dims.head_dim, length, section=full_rope, default_theta=5e6, partial=True),
    )
    value_scale = 1.0 if hf.values.get("attention_value_scale", 0.707) is None else None
    full = llama.attention.changed(
        qkv_bias=hf.flag("attention_bias", False),
        sinks=hf.flag("add_full_attention_sink_bias", False),
        value_size=hf.integer("v_head_dim", 128),
        value_scale=hf.number("attention_value_scale", 0.707) if value_scale is None else value_scale,
    )
    size = hf.optional_integer("sliding_window_size", None)
    head_dim = hf.integer("swa_head_dim", dims.head_dim)
    windowed = full.changed(
        num_heads=hf.integer("swa_num_attention_heads", dims.num_heads),
        num_kv_heads=hf.integer("swa_num_key_value_heads", 2 * dims.num_kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=hf.integer("sliding_window", 129) if size is None else size + 1,
        sinks=hf.flag("add_swa_attention_sink_bias", True),
        value_size=hf.integer("swa_v_head_dim", hf.integer("v_head_dim", 128)),
        rope=read_rope(hf, head_dim, length, section=windowed_rope, partial=True).build(max_model_len),
    )
    moe = MoE(
        group_routing(hf, num_experts=256, chosen=8, scale=1.0),
        replace(llama.dense, intermediate_size=hf.integer("moe_intermediate_size", 2048)),
    )

    @cache
    def layer(has_window: bool, sparse: bool) -> Layer:
        return llama.layer(windowed if has_window else full, moe if sparse else llama.dense)

    count = dims.num_layers
    windows = [index > 0 and (index + 1) % 6 != 0 for index in range(count)]
    if hf.has("hybrid_layer_pattern"):
        windows = layer_flags(hf, "hybrid_layer_pattern", count)
    elif hf.has("layer_types"):
        kinds = layer_types(hf, count, (), ("full_attention", "sliding_attention"))
        windows = [kind == "sliding_attention" for kind in kinds]
    return llama.spec(map(layer, windows, _sparse_layers(hf, count)))


def _sparse_layers(hf: HFConfig, count: int) -> Sequence[bool]:
    """Which layers have experts."""
    if hf.has("moe_layer_freq"):
        return layer_flags(hf, "moe_layer_freq", count)
    if not hf.has("mlp_layer_types"):
        return [index > 0 for index in range(count)]
    kinds = hf.names("mlp_layer_types")
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise hf.error("mlp_layer_types", f"must name {count} layers dense or sparse, got {kinds!r:.80}")
    return [kind == "sparse" for kind in kinds]


tensor_source = checkpoint_keys(_LAYER_KEYS)
