"""The name that some checkpoints of DeepSeek-V4 give their model type."""

from __future__ import annotations

from shardline.models.planned import deepseek_v4

REFUSAL = deepseek_v4.REFUSAL
"""Why the engine cannot load the model type."""

decoder_spec = deepseek_v4.decoder_spec
tensor_source = deepseek_v4.tensor_source
