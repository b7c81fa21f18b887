"""What the endpoints' requests and answers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from shardline.server.errors import ApiError, bad_request
from shardline.types import RequestOutput, SamplingParams

TokenIds = Annotated[list[int], Field(fail_fast=True)]

MAX_CHOICES = 128
"""Largest `n`, as at OpenAI."""


class RequestModel(BaseModel):
    """A request body: unknown fields and wrong types are errors, not guesses."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(RequestModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """A last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Accepted without effect."""


class SamplingFields(RequestModel):
    """The fields that choose tokens, those of OpenAI and those that vLLM adds. None: SamplingParams' default."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logits_digest: bool | None = None
    """Report a digest of the logits of every token."""
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    """Lower runs first."""
    cache_salt: str | None = None
    """Cached prefixes are shared only between requests of the same salt."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    model: str | None = None
    user: str | None = None

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters.

        Raises:
            ApiError: 400, a value is out of range.
        """
        given = {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = _parse_bias(self.logit_bias)
        try:
            return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
        except ValueError as error:
            raise bad_parameter(str(error)) from error

    def check_stream(self) -> StreamOptions:
        """The stream options, all off where none are given.

        Raises:
            ApiError: 400, there are options but no stream.
        """
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options"
            )
        return self.stream_options or StreamOptions()


_SAMPLING_NAMES = tuple(
    name for name in SamplingParams.__struct_fields__ if name in SamplingFields.model_fields and name != "logit_bias"
)


def bad_parameter(message: str) -> ApiError:
    """A 400 for a message that begins with the name of the parameter at fault, or with none."""
    name = message.split(" ", 1)[0]
    known = name in SamplingFields.model_fields or name in SamplingParams.__struct_fields__
    return bad_request(message, name if known else None)


def _parse_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError as error:
        raise bad_request("Invalid value for 'logit_bias': its keys must be token ids.", "logit_bias") from error


def refuse(reasons: Sequence[tuple[bool, str, str]]) -> None:
    """Refuse what is not supported: (asked for, field, why and what to do instead).

    Raises:
        ApiError: 400, for the first one asked for.
    """
    for asked, param, message in reasons:
        if asked:
            raise bad_request(message, param, "unsupported_parameter")


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one API request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """The usage so far. A prompt counts once, however many choices it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class ErrorBody(BaseModel):
    """An error, for the API's own documentation."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The answer to a request that failed."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in (
        (400, "The request cannot be."),
        (401, "The key is missing or wrong."),
        (404, "The model is not served here."),
        (413, "The body is too large."),
        (429, "Too many requests wait."),
        (503, "Starting, draining, or the engine has stopped."),
    )
}
