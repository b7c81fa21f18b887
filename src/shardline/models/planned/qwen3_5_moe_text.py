"""Qwen3.5 with experts."""

from __future__ import annotations

from shardline.models.planned import qwen3_5_text

REFUSAL = qwen3_5_text.REFUSAL
"""Why the engine cannot load the model type."""

decoder_spec = qwen3_5_text.decoder_spec
tensor_source = qwen3_5_text.tensor_source
