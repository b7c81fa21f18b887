"""The types of what users read, for annotations."""

from __future__ import annotations

from shardline.api.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
from shardline.api.requests import Prompt, TextPrompt, TokensPrompt

__all__ = ["CompletionOutput", "EmbeddingOutput", "Logprob", "Prompt", "RequestOutput", "TextPrompt", "TokensPrompt"]
