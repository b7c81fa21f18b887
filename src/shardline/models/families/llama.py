"""Llama 1 to 3, and the many models that ship as model_type "llama"."""

from __future__ import annotations

from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=32000, hidden=4096, intermediate=11008, layers=32, heads=32, positions=2048)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS)
    return llama.spec(llama.layer(llama.biased(), llama.biased_dense()))


tensor_source = checkpoint_keys(LAYER_KEYS)
