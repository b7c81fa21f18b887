"""GLM-4 (0414): four norms a layer, gate and up in one tensor, and rope on neighbouring elements of half a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import FOUR_NORM_LAYER_KEYS, attention, llama_source
from shardline.models.parameters import parse_name
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, Norm, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **FOUR_NORM_LAYER_KEYS,
    "post_attention_norm": "post_self_attn_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "post_feed_forward_norm": "post_mlp_layernorm",
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig({"partial_rotary_factor": 0.5, **config})
    dims = read_dims(
        hf,
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=13696,
        num_layers=40,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, partial=True)
    norm = Norm("rms", hf.number("rms_norm_eps", 1.5625e-7))
    gqa = attention(dims, replace(rope.build(max_model_len), interleaved=True))
    layer = Layer(
        replace(gqa, qkv_bias=hf.flag("attention_bias", True)),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
        norm,
        norm,
        norm,
        norm,
    )
    return DecoderSpec(
        model_type="glm4",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(layer,) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if layer is None or part not in ("feed_forward.gate", "feed_forward.up"):
        return llama_source(name, _LAYER_KEYS)
    dense = spec.layers[layer].feed_forward
    assert isinstance(dense, Dense)
    size = dense.intermediate_size
    rows = (size * (part == "feed_forward.up"), size)
    return TensorSource(f"model.layers.{layer}.mlp.gate_up_proj.{kind}", rows=rows)
