"""OLMo 3: OLMo 2 with a window in three of four layers. Only the full layers' rope is scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.config_fields import layer_windows, read_dtype
from shardline.models.families.olmo2 import olmo_layer, read_olmo_dims
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import llama_source, windowed_layers
from shardline.models.post_norm_layout import POST_NORM_LAYER_KEYS
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_olmo_dims(hf)
    default_types = ["full_attention" if index % 4 == 3 else "sliding_attention" for index in range(dims.num_layers)]
    windows = layer_windows(hf, dims.num_layers, hf.optional_integer("sliding_window", 4096), default_types)
    sections = hf.section("rope_parameters")
    full = hf.section("rope_scaling") if hf.has("rope_scaling") else sections.section("full_attention")
    full_rope, window_rope = (
        read_rope(hf, dims.head_dim, dims.max_position_embeddings, section=section, default_theta=500_000.0)
        for section in (full, sections.section("sliding_attention"))
    )
    full_table, window_table = full_rope.build(max_model_len), window_rope.build(max_model_len)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5), rounds_once=True)
    return DecoderSpec(
        model_type="olmo3",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(
            windows,
            lambda window: olmo_layer(hf, dims, norm, full_table if window is None else window_table, window),
        ),
        final_norm=norm,
        max_position_embeddings=full_rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, POST_NORM_LAYER_KEYS)
