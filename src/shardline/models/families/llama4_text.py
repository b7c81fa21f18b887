"""Llama 4: attention in chunks with rope in most layers, full attention without rope in the others, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import Dims, layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS, llama_source, pre_norm_layer
from shardline.models.rope import read_rope, rotated_layers
from shardline.models.spec import GQA, DecoderSpec, Dense, Layer, MoE, Norm, QueryScale, Rope, Routing, TensorSource
from shardline.models.stacked_experts import stacked_expert_source

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "feed_forward.router",
    "feed_forward.gate": "feed_forward.gate_proj",
    "feed_forward.up": "feed_forward.up_proj",
    "feed_forward.down": "feed_forward.down_proj",
    "feed_forward.shared.gate": "feed_forward.shared_expert.gate_proj",
    "feed_forward.shared.up": "feed_forward.shared_expert.up_proj",
    "feed_forward.shared.down": "feed_forward.shared_expert.down_proj",
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=8192,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=500_000.0)
    table = replace(rope.build(max_model_len), interleaved=True)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    is_rotated = rotated_layers(hf, dims.num_layers)
    chunk = hf.optional_integer("attention_chunk_size", 8192)
    default_types = ["chunked_attention" if rotated else "full_attention" for rotated in is_rotated]
    windows = layer_windows(
        hf, dims.num_layers, chunk, default_types, windowed="chunked_attention", window_key="attention_chunk_size"
    )
    kinds = list(zip(_sparse_layers(hf, dims.num_layers), is_rotated, windows, strict=True))
    dense = Dense(hf.integer("intermediate_size_mlp", 16384), read_activation(hf, "hidden_act", "silu"))
    experts = _experts(hf, dims)

    def layer(sparse: bool, rotated: bool, window: int | None) -> Layer:
        gqa = _attention(hf, dims, table if rotated else None, window, norm)
        return pre_norm_layer(gqa, experts if sparse else dense, norm)

    layers = {kind: layer(*kind) for kind in kinds}
    return DecoderSpec(
        model_type="llama4_text",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(layers[kind] for kind in kinds),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def _attention(hf: HFConfig, dims: Dims, rope: Rope | None, window: int | None, norm: Norm) -> GQA:
    """Attention of a layer with rope, whose q and k are normalised, or without, whose queries grow."""
    bias, scale = hf.flag("attention_bias", False), None
    if rope is None and hf.flag("attn_temperature_tuning", True):
        scale = QueryScale(hf.number("attn_scale", 0.1), hf.integer("floor_scale", 8192), offset=1)
    gqa = GQA(dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.head_dim**-0.5, rope=rope, window=window)
    return replace(
        gqa,
        chunked=window is not None,
        qkv_bias=bias,
        output_bias=bias,
        rotated_norm=norm if rope is not None and hf.flag("use_qk_norm", True) else None,
        query_scale=scale,
    )


def _experts(hf: HFConfig, dims: Dims) -> MoE:
    expert = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    hf.only("num_experts_per_tok", 1)
    routing = Routing(hf.integer("num_local_experts", 16), 1, scoring="sigmoid", normalized=False, scales_input=True)
    return MoE(routing, expert, shared=expert)


def _sparse_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    """Whether each layer has experts."""
    given, step = hf.values.get("moe_layers"), hf.integer("interleave_moe_layer_step", 1)
    if given is None:
        return [(index + 1) % step == 0 for index in range(num_layers)]
    if not isinstance(given, list) or not all(isinstance(index, int) for index in given):
        raise hf.error("moe_layers", f"must be a list of layer numbers, got {given!r:.80}")
    return [index in given for index in range(num_layers)]


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return stacked_expert_source(name, spec, "feed_forward.experts") or llama_source(name, _LAYER_KEYS)
