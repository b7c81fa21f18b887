"""The types of what users read, for annotations."""

from __future__ import annotations

from shardline.api.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
from shardline.api.requests import EmbedsPrompt, Prompt, TextPrompt, TokensPrompt

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbedsPrompt",
    "Logprob",
    "Prompt",
    "RequestOutput",
    "TextPrompt",
    "TokensPrompt",
]
