"""How many tokens an API request has used."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.api.outputs import RequestOutput


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How many completion tokens are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Number of tokens of one API request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage_of(outputs: Sequence[RequestOutput], reasoning_tokens: int | None = None) -> Usage:
    """The usage so far. A prompt counts once, even if it has several choices.

    `reasoning_tokens`: how many of the generated tokens are reasoning; None: that is not known.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = msgspec.UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)
