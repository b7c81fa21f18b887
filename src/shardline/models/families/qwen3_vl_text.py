"""The text model of Qwen3-VL: Qwen3. Its rope has three positions per token, which are equal for text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.families import qwen3
from shardline.models.spec import DecoderSpec, TensorSource

_DEFAULTS = {"max_position_embeddings": 128000, "rope_theta": 500000.0}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return qwen3.decoder_spec({**_DEFAULTS, **config, "model_type": "qwen3"}, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return qwen3.tensor_source(name, spec)
