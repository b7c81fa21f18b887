"""ERNIE 4.5: Llama with rope on neighbouring elements."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(
    vocab=103424, hidden=1024, intermediate=3072, layers=18, heads=16, kv_heads=2, head_dim=128, positions=131072
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5), theta=500_000.0, interleaved=True)
    bias = hf.flag("use_bias", False)
    gqa = llama.attention.changed(qkv_bias=bias, output_bias=bias)
    return llama.spec(llama.layer(gqa, replace(llama.dense, bias=bias)), tied=True)


tensor_source = checkpoint_keys(LAYER_KEYS)
