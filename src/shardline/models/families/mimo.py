"""MiMo: Qwen2 with a layer for multi-token prediction, which is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.families import qwen2
from shardline.models.spec import DecoderSpec, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return qwen2.decoder_spec({**config, "model_type": "qwen2"}, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return qwen2.tensor_source(name, spec)
