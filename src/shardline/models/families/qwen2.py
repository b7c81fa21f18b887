"""Qwen 2 and 2.5: Llama with biases on q, k and v. If the window is switched on, the upper layers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import Dims, layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, pre_norm_layer, windowed_layers
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=None,
        max_position_embeddings=32768,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    full = replace(attention(dims, rope.build(max_model_len)), qkv_bias=True)
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    return DecoderSpec(
        model_type="qwen2",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(
            qwen_windows(hf, dims), lambda window: pre_norm_layer(replace(full, window=window), dense, norm)
        ),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def qwen_windows(hf: HFConfig, dims: Dims) -> list[int | None]:
    """The window of each layer. Without `layer_types`, the layers from max_window_layers on have a window."""
    window = hf.optional_integer("sliding_window", 4096) if hf.flag("use_sliding_window", False) else None
    num_full = hf.integer("max_window_layers", 28, minimum=0)
    default_types = [
        "full_attention" if window is None or index < num_full else "sliding_attention"
        for index in range(dims.num_layers)
    ]
    return layer_windows(hf, dims.num_layers, window, default_types)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
