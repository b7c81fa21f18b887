"""The text model of Qwen3-VL: Qwen3. Its rope has three positions per token, which are equal for text."""

from __future__ import annotations

from shardline.models.families import qwen3
from shardline.models.hf_config import HFConfig
from shardline.models.spec import DecoderSpec

_DEFAULTS = {"max_position_embeddings": 128000, "rope_theta": 500000.0}


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = hf.with_values(defaults=_DEFAULTS, model_type="qwen3")
    return qwen3.decoder_spec(hf, max_model_len)


tensor_source = qwen3.tensor_source
