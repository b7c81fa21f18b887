"""The types of what users give and read, for annotations."""

from __future__ import annotations

from shardline.api.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
from shardline.api.requests import Prompt, TextPrompt, TokensPrompt
from shardline.messages.timeline import RequestMetrics
from shardline.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
