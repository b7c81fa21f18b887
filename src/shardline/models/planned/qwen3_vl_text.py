"""The text model of Qwen3-VL: Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.families import qwen3
from shardline.models.spec import DecoderSpec, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The rope of images is left out: it changes no size."""
    plain = {"model_type": "qwen3", "rope_scaling": None, "rope_parameters": None}
    return qwen3.decoder_spec({**config, **plain}, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return qwen3.tensor_source(name, spec)
