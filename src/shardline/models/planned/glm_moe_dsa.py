"""GLM-5: DeepSeek V3.2 with other numbers."""

from __future__ import annotations

from shardline.models.planned import deepseek_v32

REFUSAL = deepseek_v32.REFUSAL
"""Why the engine cannot load the model type."""

decoder_spec = deepseek_v32.decoder_spec
tensor_source = deepseek_v32.tensor_source
