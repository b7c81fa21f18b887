"""What the requests of the generating endpoints have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shardline.sampling_params import SamplingParams
from shardline.server.errors import ApiError, bad_request

TokenIds = Annotated[list[int], Field(fail_fast=True)]

MAX_CHOICES_PER_HTTP_REQUEST = 128
"""Largest `n` that a client may ask for, as at OpenAI."""


class RequestModel(BaseModel):
    """A request body. Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(RequestModel):
    """What a stream contains besides the text."""

    include_usage: bool | None = None
    """Add a last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Add the usage so far to every chunk."""
    include_obfuscation: bool | None = None
    """Accepted, but has no effect."""


class SamplingFields(RequestModel):
    """The fields that both generating endpoints have: OpenAI's and vLLM's. None: SamplingParams' default."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_HTTP_REQUEST)] | None = None
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
    """Requests with a lower number run first."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    model: str | None = None
    user: str | None = None

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters.

        Raises:
            ApiError: 400, a value is out of range.
        """
        values = {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            values["logit_bias"] = _parse_bias(self.logit_bias)
        try:
            return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **values)
        except ValueError as error:
            raise bad_parameter(str(error)) from error

    def check_stream(self) -> StreamOptions:
        """The stream options; all are off if the request has none.

        Raises:
            ApiError: 400, the request has stream options but does not ask for a stream.
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
    """A 400 with this message. If it begins with the name of a parameter, the error names that parameter."""
    name = message.split(" ", 1)[0]
    known = name in SamplingFields.model_fields or name in SamplingParams.__struct_fields__
    return bad_request(message, name if known else None)


def _parse_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError as error:
        raise bad_request("Invalid value for 'logit_bias': its keys must be token ids.", "logit_bias") from error


def refuse_if(asked: bool, param: str, message: str) -> None:
    """Refuse a request that asks for something unsupported.

    Args:
        asked: whether the request asks for it.
        param: the field that asks for it.
        message: why it is refused, and what to do instead.

    Raises:
        ApiError: 400.
    """
    if asked:
        raise bad_request(message, param, "unsupported_parameter")
