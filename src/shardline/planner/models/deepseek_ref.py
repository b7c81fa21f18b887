"""The name that some checkpoints of DeepSeek-V4 give their model type."""

from __future__ import annotations

from shardline.planner.models import deepseek_v4

decoder_spec = deepseek_v4.decoder_spec
tensor_source = deepseek_v4.tensor_source
