"""Qwen3.5: gated linear attention in three of four layers, dense blocks or experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from shardline.models.attention import HeadNorms, Projections, Score
from shardline.models.config_fields import Defaults, read_activation, read_dims, read_routing
from shardline.models.feed_forward import Dense, MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, decoder, llama_source
from shardline.models.parameters import parse_name
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer, TensorSource
from shardline.planner.models.parts.linear import LinearAttention
from shardline.planner.models.parts.sparse import PlannedGQA

_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "attention.qkv": "linear_attn.in_proj_qkv",
    "attention.z": "linear_attn.in_proj_z",
    "attention.beta": "linear_attn.in_proj_b",
    "attention.decay": "linear_attn.in_proj_a",
    "attention.conv": "linear_attn.conv1d",
    "attention.decay_log": "linear_attn.A_log",
    "attention.decay_offset": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm",
}
_DEFAULTS = Defaults(
    vocab=248320, hidden=4096, intermediate=12288, layers=32, heads=16, kv_heads=4, head_dim=256, positions=262144
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layer for multi-token prediction is left out."""
    has_experts = hf.has("num_experts")
    dims = read_dims(hf, _DEFAULTS)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6), weight_offset=1.0)
    full = PlannedGQA(
        dims.num_heads,
        Projections(dims.num_kv_heads, dims.head_dim),
        Score(dims.head_dim**-0.5),
        norms=HeadNorms(norm),
        output_gate=hf.flag("attn_output_gate", True),
    )
    linear = LinearAttention(
        num_heads=hf.integer("linear_num_key_heads", 16),
        num_value_heads=hf.integer("linear_num_value_heads", 32),
        key_head_dim=hf.integer("linear_key_head_dim", 128),
        value_head_dim=hf.integer("linear_value_head_dim", 128),
        conv_width=hf.integer("linear_conv_kernel_dim", 4),
    )
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    feed_forward: Dense | MoE = dense
    if has_experts:
        expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 512))
        shared = replace(expert, intermediate_size=hf.integer("shared_expert_intermediate_size", 512))
        routing = read_routing(hf, num_experts=256, experts_per_token=8, normalized=True)
        feed_forward = MoE(routing, expert, shared=shared, shared_gate=True)
    every = hf.integer("full_attention_interval", 4)
    full_layer, linear_layer = Layer(full, feed_forward, norm, norm), Layer(linear, feed_forward, norm, norm)
    types = hf.values.get("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(dims.num_layers)
    ]
    return decoder(hf, dims, norm, (linear_layer if kind == "linear_attention" else full_layer for kind in types))


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, _ = parse_name(name)
    if layer is not None and part == "attention.o" and not spec.layers[layer].attention.key_dim:
        return TensorSource(f"model.layers.{layer}.linear_attn.out_proj.weight")
    return llama_source(name, _KEYS)
