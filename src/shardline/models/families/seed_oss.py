"""Seed-OSS: Llama with biases of q, k and v."""

from __future__ import annotations

from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(
    vocab=155136, hidden=4096, intermediate=27648, layers=64, heads=80, kv_heads=8, head_dim=128, positions=524288
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS)
    qkv_bias, output_bias = hf.flag("attention_bias", True), hf.flag("attention_out_bias", False)
    gqa = llama.attention.changed(qkv_bias=qkv_bias, output_bias=output_bias)
    return llama.spec(llama.layer(gqa, llama.biased_dense()))


tensor_source = checkpoint_keys(LAYER_KEYS)
