"""GLM-5: DeepSeek V3.2 with other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.planned import deepseek_v32
from shardline.models.spec import DecoderSpec, TensorSource

REFUSAL = "an indexer chooses the tokens of its attention, which the engine does not have"
"""Why the engine cannot load the model type."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return deepseek_v32.decoder_spec(config, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return deepseek_v32.tensor_source(name, spec)
