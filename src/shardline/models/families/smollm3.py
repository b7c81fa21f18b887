"""SmolLM3: Llama with some layers without rope."""

from __future__ import annotations

from functools import cache

from shardline.models.config_fields import Defaults, layer_windows
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.rope import rotated_layers
from shardline.models.spec import DecoderSpec, Layer

_DEFAULTS = Defaults(vocab=128256, hidden=2048, intermediate=11008, layers=36, heads=16, kv_heads=4, positions=32768)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS, theta=2_000_000.0)
    gqa, dense, num_layers = llama.biased(), llama.biased_dense(), llama.dims.num_layers
    is_rotated = rotated_layers(hf, num_layers)
    window = hf.optional_integer("sliding_window", None) if hf.flag("use_sliding_window", False) else None
    types = ["full_attention" if rotated or window is None else "sliding_attention" for rotated in is_rotated]

    @cache
    def layer(rotated: bool, window: int | None) -> Layer:
        return llama.layer(gqa.changed(rope=gqa.positions.rope if rotated else None, window=window), dense)

    return llama.spec(map(layer, is_rotated, layer_windows(hf, num_layers, window, types)), tied=True)


tensor_source = checkpoint_keys(LAYER_KEYS)
