"""Kimi K2, the text model of Kimi K2.5 too: DeepSeek V3 with other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.families import deepseek_v3
from shardline.models.spec import DecoderSpec, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return deepseek_v3.decoder_spec({**config, "model_type": "deepseek_v3"}, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return deepseek_v3.tensor_source(name, spec)
