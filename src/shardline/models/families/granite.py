"""Granite: Llama with factors of the embedding, of each block's output and of the scores, and divided logits."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=32000, hidden=4096, intermediate=11008, layers=32, heads=32, positions=2048)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS)
    layer = llama.layer(llama.biased(scale=hf.number("attention_multiplier", 1.0)), llama.biased_dense())
    return replace(
        llama.spec(replace(layer, residual_scale=hf.number("residual_multiplier", 1.0))),
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        logits_scale=1 / hf.number("logits_scaling", 1.0),
    )


tensor_source = checkpoint_keys(LAYER_KEYS)
