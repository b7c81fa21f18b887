"""The name that some checkpoints of DeepSeek-V4 give their model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.planned import deepseek_v4
from shardline.models.spec import DecoderSpec, TensorSource

REFUSAL = deepseek_v4.REFUSAL
"""Why the engine cannot load the model type."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return deepseek_v4.decoder_spec(config, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return deepseek_v4.tensor_source(name, spec)
