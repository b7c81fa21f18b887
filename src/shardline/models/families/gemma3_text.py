"""Gemma 3, text only: Gemma 2 with norms on q and k instead of soft-caps. Five windowed layers follow each other, then
one with full attention; each kind has its own rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import Dims, layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import FOUR_NORM_LAYER_KEYS, attention, llama_source, windowed_layers
from shardline.models.rope import RopeConfig, read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=262208,
        hidden_size=2304,
        intermediate_size=9216,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
    )
    hf.only("use_bidirectional_attention", False)
    hf.only("attn_logit_softcapping")
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6), weight_offset=1.0)
    bias = hf.flag("attention_bias", False)
    full_rope, window_rope = (rope.build(max_model_len) for rope in _ropes(hf, dims))
    full = replace(
        attention(dims, full_rope, scale=hf.number("query_pre_attn_scalar", 256) ** -0.5),
        qk_norm=norm,
        qkv_bias=bias,
        output_bias=bias,
    )
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_activation", "gelu_pytorch_tanh"))

    def layer(window: int | None) -> Layer:
        own = full if window is None else replace(full, window=window, rope=window_rope)
        return Layer(own, dense, norm, norm, norm, norm)

    return DecoderSpec(
        model_type="gemma3_text",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(_windows(hf, dims), layer),
        final_norm=norm,
        # This number already includes the rope scaling, for every type of scaling.
        max_position_embeddings=dims.max_position_embeddings,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        embedding_scale=dims.hidden_size**0.5,
        logits_softcap=hf.optional_number("final_logit_softcapping", None),
    )


def _windows(hf: HFConfig, dims: Dims) -> list[int | None]:
    pattern = hf.integer("sliding_window_pattern", 6)
    default_types = [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(dims.num_layers)
    ]
    return layer_windows(hf, dims.num_layers, hf.optional_integer("sliding_window", 4096), default_types)


def _ropes(hf: HFConfig, dims: Dims) -> tuple[RopeConfig, RopeConfig]:
    """Rope of the full layers, and rope of the windowed layers. In older files only the full layers have a scaling."""
    sections = hf.section("rope_parameters")
    full = hf.section("rope_scaling") if hf.has("rope_scaling") else sections.section("full_attention")
    window_theta = hf.number("rope_local_base_freq", 10_000.0)
    windowed = sections.section("sliding_attention")
    windowed = HFConfig({"rope_theta": window_theta, **windowed.values}, windowed.section_name)
    return (
        read_rope(hf, dims.head_dim, dims.max_position_embeddings, section=full, default_theta=1_000_000.0),
        read_rope(hf, dims.head_dim, dims.max_position_embeddings, section=windowed),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, FOUR_NORM_LAYER_KEYS)
