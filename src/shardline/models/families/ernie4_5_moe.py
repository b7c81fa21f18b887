"""ERNIE 4.5 with experts: softmax scores, a learned bias for choosing experts, and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.deepseek_layout import DEEPSEEK_LAYER_KEYS
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import LAYER_KEYS, attention, llama_source, pre_norm_layer
from shardline.models.parameters import parse_name
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, MoE, Norm, Routing, TensorSource

_LAYER_KEYS: Mapping[str, str] = {**DEEPSEEK_LAYER_KEYS, **LAYER_KEYS}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=103424,
        hidden_size=2560,
        intermediate_size=12288,
        num_layers=28,
        num_heads=20,
        num_kv_heads=4,
        head_dim=None,
        max_position_embeddings=131072,
    )
    hf.only("use_bias", False)
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=500_000.0)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    gqa = attention(dims, replace(rope.build(max_model_len), interleaved=True))
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    dense_layer, moe_layer = pre_norm_layer(gqa, dense, norm), pre_norm_layer(gqa, _experts(hf, dense), norm)
    return DecoderSpec(
        model_type="ernie4_5_moe",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(moe_layer if sparse else dense_layer for sparse in _sparse_layers(hf, dims.num_layers)),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
    )


def _experts(hf: HFConfig, dense: Dense) -> MoE:
    routing = Routing(hf.integer("moe_num_experts", 64), hf.integer("moe_k", 6), correction_bias=True)
    if routing.experts_per_token > routing.num_experts:
        raise hf.error("moe_k", f"must be at most moe_num_experts ({routing.num_experts})")
    expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 1536))
    num_shared = hf.integer("moe_num_shared_experts", 2, minimum=0)
    shared = replace(expert, intermediate_size=expert.intermediate_size * num_shared) if num_shared else None
    return MoE(routing, expert, shared)


def _sparse_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    start, end = hf.integer("moe_layer_start_index", 1, minimum=0), hf.integer("moe_layer_end_index", -1, minimum=-1)
    interval, last = hf.integer("moe_layer_interval", 1), num_layers - 1 if end == -1 else end
    return [(index + 1) % interval == 0 and start <= index <= last for index in range(num_layers)]


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part == "feed_forward.router" and kind == "bias":
        return TensorSource(f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias", index=(0, 1))
    return llama_source(name, _LAYER_KEYS)
