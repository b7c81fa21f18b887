"""Qwen 3 (dense): Llama with norms on q and k. The head size is independent of the hidden size."""

from __future__ import annotations

from shardline.models.config_fields import Defaults
from shardline.models.families.qwen2 import windowed_spec
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(
    vocab=151936, hidden=4096, intermediate=22016, layers=32, heads=32, kv_heads=32, head_dim=128, positions=32768
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS)
    return windowed_spec(llama, llama.biased(qk_norm=llama.norm))


tensor_source = checkpoint_keys(LAYER_KEYS)
