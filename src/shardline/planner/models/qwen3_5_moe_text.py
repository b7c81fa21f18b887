"""Qwen3.5 with experts."""

from __future__ import annotations

from shardline.planner.models import qwen3_5_text

decoder_spec = qwen3_5_text.decoder_spec
tensor_source = qwen3_5_text.tensor_source
