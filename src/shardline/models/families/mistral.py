"""Mistral: Llama with the same sliding window in all layers, or with none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.config_fields import layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, pre_norm_layer
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=None,
        max_position_embeddings=131072,
    )
    window = hf.optional_integer("sliding_window", 4096)
    default_type = "full_attention" if window is None else "sliding_attention"
    if set(layer_windows(hf, dims.num_layers, window, [default_type] * dims.num_layers)) != {window}:
        raise hf.error("layer_types", "must be the same for all layers of a mistral model")
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    layer = pre_norm_layer(
        attention(dims, rope.build(max_model_len), window=window),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
        norm,
    )
    return DecoderSpec(
        model_type="mistral",
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
    return llama_source(name)
