"""Shardline: distributed LLM inference. One answer, any shape of hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.api.adapters import LoRARequest
    from shardline.api.async_llm import AsyncLLM
    from shardline.api.beam_search import BeamSearchParams
    from shardline.api.llm import LLM
    from shardline.api.outputs import CompletionOutput, RequestOutput
    from shardline.api.pooling import PoolingParams, PoolingRequestOutput
    from shardline.config.engine import EngineConfig
    from shardline.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "shardline.api.llm",
    "AsyncLLM": "shardline.api.async_llm",
    "EngineConfig": "shardline.config.engine",
    "LoRARequest": "shardline.api.adapters",
    "CompletionOutput": "shardline.api.outputs",
    "PoolingParams": "shardline.api.pooling",
    "PoolingRequestOutput": "shardline.api.pooling",
    "RequestOutput": "shardline.api.outputs",
    "SamplingParams": "shardline.sampling_params",
    "BeamSearchParams": "shardline.api.beam_search",
    "StructuredOutputsParams": "shardline.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import shardline` and `--help` are fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, for completion in a shell."""
    return __all__
