"""GLM-5: DeepSeek V3.2 with other numbers."""

from __future__ import annotations

from shardline.planner.models import deepseek_v32

decoder_spec = deepseek_v32.decoder_spec
tensor_source = deepseek_v32.tensor_source
