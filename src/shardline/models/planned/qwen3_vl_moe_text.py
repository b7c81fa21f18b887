"""The text model of Qwen3-VL with experts: Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.families import qwen3_moe
from shardline.models.spec import DecoderSpec, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The rope of images is left out: it changes no size."""
    plain = {"model_type": "qwen3_moe", "rope_scaling": None, "rope_parameters": None}
    return qwen3_moe.decoder_spec({**config, **plain}, max_model_len)


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return qwen3_moe.tensor_source(name, spec)
