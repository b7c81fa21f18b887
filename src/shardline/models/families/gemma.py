"""Gemma 1: Llama with scaled embeddings, norms that add one to their weight, and a tanh GELU."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(
    vocab=256000, hidden=3072, intermediate=24576, layers=28, heads=16, kv_heads=16, head_dim=256, positions=8192
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("use_bidirectional_attention", False)
    norm = Norm("rms", 1e-6, weight_offset=1.0)
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=norm, activation="gelu_pytorch_tanh")
    dense = llama.dense
    if dense.activation == "gelu":  # the first releases say "gelu" and mean its tanh form
        dense = replace(dense, activation="gelu_tanh")
    layer = llama.layer(llama.biased(), dense)
    return replace(llama.spec(layer, tied=True), embedding_scale=llama.dims.hidden_size**0.5)


tensor_source = checkpoint_keys(LAYER_KEYS)
