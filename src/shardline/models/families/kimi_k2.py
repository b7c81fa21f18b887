"""Kimi K2, the text model of Kimi K2.5 too: DeepSeek V3 with other numbers."""

from __future__ import annotations

from shardline.models.families import deepseek_v3
from shardline.models.hf_config import HFConfig
from shardline.models.spec import DecoderSpec


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return deepseek_v3.decoder_spec(hf.with_values(model_type="deepseek_v3"), max_model_len)


tensor_source = deepseek_v3.tensor_source
