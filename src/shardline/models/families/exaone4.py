"""EXAONE 4: norms after each block, norms of q and k, and, if some layers have a window, rope only in these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, windowed_layers
from shardline.models.post_norm_layout import POST_NORM_LAYER_KEYS, post_norm_layer
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=16384,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=None,
        max_position_embeddings=2048,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    table = rope.build(max_model_len)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    sliding_window = hf.optional_integer("sliding_window", 4096)

    def layer(window: int | None) -> Layer:
        is_rotated = sliding_window is None or window is not None
        gqa = replace(attention(dims, table, window=window), qk_norm=norm, rope=table if is_rotated else None)
        return post_norm_layer(gqa, dense, norm)

    return DecoderSpec(
        model_type="exaone4",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(_windows(hf, dims.num_layers, sliding_window), layer),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def _windows(hf: HFConfig, num_layers: int, sliding_window: int | None) -> list[int | None]:
    default_types = ["full_attention"] * num_layers
    if sliding_window is not None and not hf.has("layer_types"):
        pattern = hf.integer("sliding_window_pattern", 4)
        default_types = [
            "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)
        ]
    return layer_windows(hf, num_layers, sliding_window, default_types)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, POST_NORM_LAYER_KEYS)
