"""Gemma 3, text only: Gemma 2 with norms on q and k instead of soft-caps. Five windowed layers follow each other, then
one with full attention; each kind has its own rope."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, full_every, read_dims
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import FOUR_NORM_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.rope import read_rope, rope_sections
from shardline.models.spec import DecoderSpec, Layer

_DEFAULTS = Defaults(
    vocab=262208, hidden=2304, intermediate=9216, layers=26, heads=8, kv_heads=4, head_dim=256, positions=131072
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("use_bidirectional_attention", False)
    hf.only("attn_logit_softcapping")
    dims = read_dims(hf, _DEFAULTS)
    full, windowed = rope_sections(hf)
    windowed = windowed.with_values(defaults={"rope_theta": hf.number("rope_local_base_freq", 10_000.0)})
    length = dims.max_position_embeddings
    llama = llama_like(
        hf,
        max_model_len,
        _DEFAULTS,
        norm=Norm("rms", 1e-6, weight_offset=1.0),
        rope=read_rope(hf, dims.head_dim, length, section=full, default_theta=1_000_000.0),
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
    )
    window_rope = read_rope(hf, dims.head_dim, length, section=windowed).build(max_model_len)
    gqa = llama.biased(scale=hf.number("query_pre_attn_scalar", 256) ** -0.5, qk_norm=llama.norm)

    def layer(window: int | None) -> Layer:
        return llama.four_norm_layer(gqa if window is None else gqa.changed(window=window, rope=window_rope))

    types = full_every(hf.integer("sliding_window_pattern", 6), dims.num_layers)
    layers = llama.by_window(layer, hf.optional_integer("sliding_window", 4096), types)
    return replace(
        llama.spec(layers, tied=True),
        max_position_embeddings=length,  # it already includes the rope scaling, for every type of scaling
        embedding_scale=dims.hidden_size**0.5,
        logits_softcap=hf.optional_number("final_logit_softcapping", None),
    )


tensor_source = checkpoint_keys(FOUR_NORM_LAYER_KEYS)
