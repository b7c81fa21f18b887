"""SmolLM3: Llama with some layers without rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, pre_norm_layer
from shardline.models.rope import read_rope, rotated_layers
from shardline.models.spec import DecoderSpec, Dense, Layer, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=4,
        head_dim=None,
        max_position_embeddings=32768,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=2_000_000.0)
    table = rope.build(max_model_len)
    norm, bias = Norm("rms", hf.number("rms_norm_eps", 1e-6)), hf.flag("attention_bias", False)
    gqa = replace(attention(dims, table), qkv_bias=bias, output_bias=bias)
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"), bias=hf.flag("mlp_bias", False))
    is_rotated = rotated_layers(hf, dims.num_layers)
    window = hf.optional_integer("sliding_window", None) if hf.flag("use_sliding_window", False) else None
    default_types = ["full_attention" if rotated or window is None else "sliding_attention" for rotated in is_rotated]
    kinds = list(zip(is_rotated, layer_windows(hf, dims.num_layers, window, default_types), strict=True))

    def layer(rotated: bool, window: int | None) -> Layer:
        return pre_norm_layer(replace(gqa, rope=table if rotated else None, window=window), dense, norm)

    layers = {kind: layer(*kind) for kind in kinds}
    return DecoderSpec(
        model_type="smollm3",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(layers[kind] for kind in kinds),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name)
