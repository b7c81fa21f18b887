"""The types of what users give and read, for annotations: their public place, wherever the code has them."""

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
