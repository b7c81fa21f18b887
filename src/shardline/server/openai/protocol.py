"""What the bodies of requests and answers have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from shardline.sampling_params import SamplingParams
from shardline.server.errors import ApiError, bad_request
from shardline.server.json_body import RequestModel
from shardline.server.openai.answer_form import FormFields
from shardline.server.openai.ignored_fields import IgnoredFields
from shardline.server.openai.logit_bias import LogitBias, parse_bias
from shardline.server.resume import Resume, read_resume

T = TypeVar("T")

TokenIds = Annotated[list[int], Field(fail_fast=True)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

MAX_CHOICES_PER_HTTP_REQUEST = 128
"""Largest `n` that a client may ask for, as at OpenAI."""
MAX_STOP_IDS = 4096
MAX_ALLOWED_IDS = 1 << 18
"""More than there are tokens in any vocabulary."""


class StreamOptions(RequestModel):
    """What a stream contains besides the text."""

    include_usage: bool | None = None
    """Add a last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Add the usage so far to every chunk; it needs `include_usage`."""
    include_obfuscation: bool | None = None
    """Accepted, but has no effect."""

    @property
    def counts_always(self) -> bool:
        """Whether each chunk has the usage so far. As in vLLM, none has it unless the last one has."""
        return bool(self.include_usage and self.continuous_usage_stats)


class SamplingFields(FormFields, IgnoredFields):
    """The fields that both generating endpoints have: OpenAI's and vLLM's. None: SamplingParams' default."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_HTTP_REQUEST)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logits_digest: bool | None = None
    """Report a digest of the logits of every token."""
    receipt: bool | None = None
    """Give every choice a receipt, see `receipts.receipt.Receipt`."""
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED_IDS, fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    """Requests with a lower number run first."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Of log probabilities: tokens are written as token_id:N, not as their texts."""
    return_metrics: bool | None = None
    """Add to the answer where its time went."""
    logprob_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    """The tokens whose log probabilities are reported beside that of the chosen one; `logprobs` must be set too."""
    model: str | None = None
    user: str | None = None
    use_beam_search: bool | None = None
    """Find the `n` likeliest outputs instead of sampling."""
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] | None = None
    """Of beam search, see BeamSearchParams."""
    prompt_logprobs: Annotated[int, Field(strict=False)] | None = None
    logits_processors: Any = None
    watermark: bool | None = None
    """Whether the answer is marked with the server's key, as TGI's clients ask for it; None: if it has one."""
    watermarking: bool | None = None
    """The same, as vLLM's clients ask for it."""
    lora_path: Any = None
    truncate_prompt_tokens: int | None = None
    """Keep only that many of the prompt's tokens; -1: as many as leave room for one token of output."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are cut off; None: left, so the prompt's last ones stay."""
    return_token_offsets: bool | None = None
    """Of rendered requests: report where in the prompt's text each token stands."""
    min_new_tokens: int | None = None
    resume: Annotated[Any, BeforeValidator(read_resume)] = None
    """What another server has sent of this stream, see `server.resume.Resume`; for routers."""

    def check_supported(self, *, streams: bool = False) -> None:
        """Refuse what would change the answer and is not supported; `streams`: the request says elsewhere that it does.

        Raises:
            ApiError: 400.
        """
        refuse_if(
            self.prompt_logprobs is not None and (streams or bool(self.stream)),
            "prompt_logprobs",
            "'prompt_logprobs' cannot be streamed: set 'stream' to false.",
        )
        refuse_if(
            self.resume is not None and not self.stream, "resume", "'resume' is for streams: set 'stream' to true."
        )
        if self.logprob_token_ids and not self.reports_logprobs:
            raise bad_request("When using 'logprob_token_ids', 'logprobs' must be set.", "logprob_token_ids")
        refuse_if(
            bool(self.use_beam_search) and self.prompt_logprobs is not None,
            "use_beam_search",
            "'prompt_logprobs' is not supported with beam search.",
        )
        refuse_if(
            bool(self.use_beam_search) and bool(self.receipt),
            "receipt",
            "'receipt' is not supported with beam search: its outputs are not sampled.",
        )
        refuse_if(bool(self.logits_processors), "logits_processors", "'logits_processors' is not supported.")
        refuse_if(self.lora_path is not None, "lora_path", "Name an adapter as the 'model' instead.")
        refuse_if(
            {self.watermark, self.watermarking} == {True, False},
            "watermark",
            "'watermark' and 'watermarking' are one field: set one of them.",
        )
        refuse_if(
            bool(self.use_beam_search) and self.wants_mark is True,
            "use_beam_search",
            "Beam search draws no tokens, so 'watermark' is not supported with it.",
        )

    @property
    def wants_mark(self) -> bool | None:
        """`watermark`, or its other name."""
        return self.watermarking if self.watermark is None else self.watermark

    @property
    def reports_logprobs(self) -> bool:
        """Whether log probabilities of the output are asked for, where that is a field of its own."""
        return True

    @property
    def queueing(self) -> dict[str, Any]:
        """The priority, the cache salt and the model, as `Generation.start` takes them."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt or "", "model": self.model}

    @property
    def admission(self) -> dict[str, Any]:
        """`queueing`, and with what the answer goes on, as `Generation.start` takes them."""
        return {**self.queueing, "resume": self.resume}

    def origin(self, response_id: str) -> tuple[str, int]:
        """The id of the answer, and when it was created: an answer that goes on has those that it had."""
        resume: Resume | None = self.resume
        return (response_id, int(time.time())) if resume is None else (resume.id or response_id, resume.created)

    def truncate_prompt(self, token_ids: list[T], most: int | None = None) -> list[T]:
        """The part of a prompt that `truncate_prompt_tokens` leaves.

        `most`: what -1 leaves; None: all.

        Raises:
            ApiError: 400, the number is not positive.
        """
        count = most if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return truncate_prompt(token_ids, count, self.truncation_side or "left")

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The engine's parameters. `defaults`: those of the model's generation config, for what the request leaves out.

        Raises:
            ApiError: 400, a value is out of range.
        """
        values = dict(defaults or {})
        usual = values.pop("max_tokens", None)
        max_tokens = usual if max_tokens is None else max_tokens
        values |= {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        if self.min_new_tokens is not None:
            values.setdefault("min_tokens", self.min_new_tokens)
        if not self.logprob_token_ids:
            values.pop("logprob_token_ids", None)
        values["watermarking"] = self.wants_mark
        if self.logit_bias:
            values["logit_bias"] = parse_bias(self.logit_bias)
        try:
            return SamplingParams(
                max_tokens=max_tokens, logprobs=None if self.logprob_token_ids else logprobs, **values
            )
        except ValueError as error:
            raise bad_parameter(str(error)) from error

    def check_stream(self, *, with_usage: bool = False) -> StreamOptions:
        """The stream options; all are off if the request has none. `with_usage`: each chunk of every stream has it.

        Raises:
            ApiError: 400, the request has stream options but does not ask for a stream.
        """
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise bad_request(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options"
            )
        if with_usage:
            return StreamOptions(include_usage=True, continuous_usage_stats=True)
        return self.stream_options or StreamOptions()


def truncate_prompt(token_ids: list[T], count: int | None, side: Literal["left", "right"] = "left") -> list[T]:
    """The last `count` tokens of a prompt, or the first if the right `side` is cut off; None or -1: all of them.

    Raises:
        ApiError: 400, the number is not positive.
    """
    if count is None or count == -1:
        return token_ids
    if count < 1:
        raise bad_request("'truncate_prompt_tokens' must be at least 1, or -1.", "truncate_prompt_tokens")
    return token_ids[-count:] if side == "left" else token_ids[:count]


CHAT_AND_COMPLETION_FIELDS = (
    "return_token_ids", "return_metrics", "logits_digest", "prompt_logprobs", "logprob_token_ids", "use_beam_search",
)  # fmt: skip
"""Fields whose results only the answers of these two endpoints can show."""

_SAMPLING_NAMES = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.model_fields
    and name not in (*IgnoredFields.model_fields, "logit_bias", "structured_outputs", "truncate_prompt_tokens")
)


def bad_parameter(message: str) -> ApiError:
    """A 400 with this message. If it begins with the name of a parameter, the error names that parameter."""
    name = message.split(" ", 1)[0]
    known = name in SamplingFields.model_fields or name in SamplingParams.__struct_fields__
    return bad_request(message, name if known else None)


def refuse_if(condition: bool, param: str, message: str) -> None:
    """Refuse a request whose field `param` asks for something unsupported; `message` says what to do instead.

    Raises:
        ApiError: 400.
    """
    if condition:
        raise bad_request(message, param, "unsupported_parameter")
