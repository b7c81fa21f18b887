"""How many tokens an API request has used."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.types import RequestOutput


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Number of tokens of one API request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """The usage so far. A prompt counts once, even if it has several choices."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
