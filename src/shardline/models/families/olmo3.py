"""OLMo 3: OLMo 2 with a window in three of four layers. Only the full layers' rope is scaled."""

from __future__ import annotations

from shardline.models.config_fields import full_every, read_dims
from shardline.models.families import olmo2
from shardline.models.hf_config import HFConfig
from shardline.models.rope import read_rope, rope_sections
from shardline.models.spec import DecoderSpec, Layer


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    dims = read_dims(hf, olmo2.DEFAULTS)
    full_rope, rope = (
        read_rope(hf, dims.head_dim, dims.max_position_embeddings, section=section, default_theta=500_000.0)
        for section in rope_sections(hf)
    )
    llama, gqa = olmo2.read_olmo(hf, max_model_len, full_rope)
    windowed = gqa.changed(rope=rope.build(max_model_len))

    def layer(window: int | None) -> Layer:
        return llama.post_norm_layer(gqa if window is None else windowed.changed(window=window))

    return llama.spec(
        llama.by_window(layer, hf.optional_integer("sliding_window", 4096), full_every(4, dims.num_layers))
    )


tensor_source = olmo2.tensor_source
