"""MiMo: Qwen2 with a layer for multi-token prediction, which is left out."""

from __future__ import annotations

from shardline.models.families import qwen2
from shardline.models.hf_config import HFConfig
from shardline.models.spec import DecoderSpec


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return qwen2.decoder_spec(hf.with_values(model_type="qwen2"), max_model_len)


tensor_source = qwen2.tensor_source
