"""Command R7B and Command A: one LayerNorm feeds attention and feed-forward, and rope is only in windowed layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import divided, layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, windowed_layers
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    head_dim = divided(hf, "hidden_size", hf.integer("hidden_size", 8192), hf.integer("num_attention_heads", 64))
    hf = HFConfig({**config, "head_dim": head_dim})
    dims = read_dims(
        hf,
        vocab_size=256000,
        hidden_size=8192,
        intermediate_size=22528,
        num_layers=40,
        num_heads=64,
        num_kv_heads=None,
        head_dim=None,
        max_position_embeddings=8192,
    )
    hf.only("use_qk_norm", False)
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    table = replace(rope.build(max_model_len), interleaved=True)
    norm, bias = Norm("layer", hf.number("layer_norm_eps", 1e-5)), hf.flag("attention_bias", False)
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))

    def layer(window: int | None) -> Layer:
        gqa = attention(dims, table, window=window)
        gqa = replace(gqa, rope=None if window is None else table, qkv_bias=bias, output_bias=bias)
        return Layer(gqa, dense, norm, None, parallel=True)

    pattern = hf.integer("sliding_window_pattern", 4)
    default_types = [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(dims.num_layers)
    ]
    windows = layer_windows(hf, dims.num_layers, hf.optional_integer("sliding_window", 4096), default_types)
    return DecoderSpec(
        model_type="cohere2",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(windows, layer),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        logits_scale=hf.number("logit_scale", 0.0625),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
