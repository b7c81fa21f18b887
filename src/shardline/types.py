"""The types of what users read, for annotations."""

from __future__ import annotations

from shardline.api.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
)
from shardline.api.requests import Prompt, TextPrompt, TokensPrompt

__all__ = [
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "Prompt",
    "RequestOutput",
    "ScoringOutput",
    "TextPrompt",
    "TokensPrompt",
]
