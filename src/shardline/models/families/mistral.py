"""Mistral: Llama with the same sliding window in all layers, or with none."""

from __future__ import annotations

from shardline.models.config_fields import Defaults, layer_windows
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=32000, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, positions=131072)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama, window = llama_like(hf, max_model_len, _DEFAULTS), hf.optional_integer("sliding_window", 4096)
    types = ["full_attention" if window is None else "sliding_attention"] * llama.dims.num_layers
    if set(layer_windows(hf, llama.dims.num_layers, window, types)) != {window}:
        raise hf.error("layer_types", "must be the same for all layers of a mistral model")
    return llama.spec(llama.layer(llama.attention.changed(window=window)))


tensor_source = checkpoint_keys(LAYER_KEYS)
