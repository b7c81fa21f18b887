"""Qwen 2 and 2.5: Llama with biases on q, k and v. If the window is switched on, the upper layers have it."""

from __future__ import annotations

from shardline.models.attention import GQA
from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, LlamaLike, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=151936, hidden=4096, intermediate=22016, layers=32, heads=32, kv_heads=32, positions=32768)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS)
    return windowed_spec(llama, llama.attention.changed(qkv_bias=True))


def windowed_spec(llama: LlamaLike, attention: GQA) -> DecoderSpec:
    """The model with the windows of Qwen: without `layer_types`, the layers from max_window_layers on have one."""
    hf, num_layers = llama.hf, llama.dims.num_layers
    window = hf.optional_integer("sliding_window", 4096) if hf.flag("use_sliding_window", False) else None
    num_full = hf.integer("max_window_layers", 28, minimum=0)
    types = [
        "full_attention" if window is None or index < num_full else "sliding_attention" for index in range(num_layers)
    ]

    return llama.spec(llama.by_window(lambda window: llama.layer(attention.changed(window=window)), window, types))


tensor_source = checkpoint_keys(LAYER_KEYS)
