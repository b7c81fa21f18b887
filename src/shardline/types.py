"""The types of what users read, for annotations."""

from __future__ import annotations

from shardline.api.outputs import CompletionOutput, Logprob, RequestOutput
from shardline.api.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from shardline.api.requests import Prompt, TextPrompt, TokensPrompt

__all__ = [
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "Prompt",
    "RequestOutput",
    "ScoringOutput",
    "TextPrompt",
    "TokensPrompt",
]
