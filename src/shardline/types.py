"""The types of what users read, for annotations."""

from __future__ import annotations

from shardline.api.logprobs import Logprob
from shardline.api.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    RequestOutput,
    ScoringOutput,
)
from shardline.api.prompts import EmbedsPrompt, Prompt, TextPrompt, TokensPrompt

__all__ = [
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbedsPrompt",
    "Logprob",
    "Prompt",
    "RequestOutput",
    "ScoringOutput",
    "TextPrompt",
    "TokensPrompt",
]
