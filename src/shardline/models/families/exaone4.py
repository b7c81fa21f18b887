"""EXAONE 4: norms after each block, norms of q and k, and, if some layers have a window, rope only in these."""

from __future__ import annotations

from shardline.models.config_fields import Defaults, full_every
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import POST_NORM_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer

_DEFAULTS = Defaults(vocab=102400, hidden=4096, intermediate=16384, layers=32, heads=32, kv_heads=32, positions=2048)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5))
    num_layers, sliding_window = llama.dims.num_layers, hf.optional_integer("sliding_window", 4096)
    types = ["full_attention"] * num_layers
    if sliding_window is not None and not hf.has("layer_types"):
        types = full_every(hf.integer("sliding_window_pattern", 4), num_layers)

    def layer(window: int | None) -> Layer:
        gqa = llama.attention.changed(window=window, qk_norm=llama.norm)
        is_rotated = sliding_window is None or window is not None
        return llama.post_norm_layer(gqa if is_rotated else gqa.changed(rope=None))

    return llama.spec(llama.by_window(layer, sliding_window, types))


tensor_source = checkpoint_keys(POST_NORM_LAYER_KEYS)
