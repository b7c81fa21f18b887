"""Qwen3.5 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.planned import qwen3_5_text
from shardline.models.spec import DecoderSpec, TensorSource

REFUSAL = "its recurrent layers keep a state per request, which the engine does not have"
"""Why the engine cannot load the model type."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return qwen3_5_text.decoder_spec(config, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return qwen3_5_text.tensor_source(name, spec)
