"""Requests to continue a text or token ids, and how the engine takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from pydantic import Field

from shardline.api.prompt_embeds import join_parts
from shardline.api.prompts import EncodedPrompt
from shardline.server.errors import bad_request, missing_parameter
from shardline.server.openai.answer_grammar import make_answer_grammar
from shardline.server.openai.generation import Prepared
from shardline.server.openai.protocol import MAX_CHOICES_PER_HTTP_REQUEST, SamplingFields, TokenIds, refuse_if
from shardline.server.prompts import decode_tokens, encode_text, most_encoded, read_embeds
from shardline.server.service import Service
from shardline.text.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 500_000
"""The most log probabilities of the prompts in one answer: they fill memory, and take long to write."""
_DEFAULT_MAX_TOKENS = 16
_INSERTIONS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen, Granite
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # Code Llama
)
"""How models that were trained for it expect the two texts around the one that they write."""

MAX_PROMPTS = 2048
"""Largest number of prompts in one request, as at OpenAI."""

Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]
PromptValue = str | Texts | TokenIds | TokenIdLists


def list_prompts(value: PromptValue, param: str) -> list[str | list[int]]:
    """The prompts as a list; `param`: the field that has them.

    Raises:
        ApiError: 400, there are none or too many.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise bad_request(f"'{param}' must not be empty.", param)
    if isinstance(value[0], int):
        return [value]  # the first item tells a list of ids from a list of prompts
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"'{param}' has {len(value)} entries; at most {MAX_PROMPTS} are taken in one request.", param)
    return list(value)


async def encode_prompt(
    service: Service, prompt: str | list[int], add_special_tokens: bool, *, truncates: bool = False
) -> list[int]:
    """The token ids of one prompt. `truncates`: some of them are cut off afterwards, so it may be longer.

    Raises:
        ApiError: 400, it is certainly too long, or the model has no tokenizer.
    """
    # Many short prompts must not keep other streams waiting.
    await asyncio.sleep(0)
    if not isinstance(prompt, str):
        return prompt
    limit = most_encoded(service) if truncates else None
    return await encode_text(service, prompt, add_special_tokens, max_tokens=limit)


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: PromptValue | None = None
    prompt_embeds: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    """Prompts as tensors [number of tokens, hidden size]: the base64 of what torch.save writes. They come first."""
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_HTTP_REQUEST)] | None = None
    """Generate that many choices and answer with the `n` whose tokens are the likeliest."""
    suffix: str | None = None

    def check(self) -> None:
        """Check the fields together.

        Raises:
            ApiError: 400, the fields contradict each other or ask for something unsupported.
        """
        self.check_supported()
        if self.prompt is None and not self.prompt_embeds:
            if "prompt" in self.model_fields_set and self.prompt_embeds is None:
                raise bad_request("Invalid value for 'prompt': expected a string or an array, but got null.", "prompt")
            if self.prompt_embeds is None:
                raise missing_parameter("prompt")
            raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        refuse_if(
            bool(self.use_beam_search) and self.num_prompt_logprobs is not None,
            "use_beam_search",
            "Log probabilities of the prompt ('echo' with 'logprobs') are not supported with beam search.",
        )
        refuse_if(
            bool(self.prompt_embeds) and self.num_prompt_logprobs is not None,
            "prompt_embeds",
            "Log probabilities of the prompt are not compatible with prompt embeds.",
        )
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise bad_request("'best_of' must not be smaller than 'n'.", "best_of")
            refuse_if(
                bool(self.stream) and self.best_of > (self.n or 1),
                "best_of",
                "'best_of' larger than 'n' cannot be streamed: the choices are ranked when all of them are whole.",
            )
        refuse_if(
            bool(self.receipt) and self.generates_nothing,
            "receipt",
            "'receipt' is of generated tokens: 'max_tokens' must not be 0.",
        )
        refuse_if(
            bool(self.logprob_token_ids) and bool(self.echo) and self.generates_nothing,
            "logprob_token_ids",
            "'logprob_token_ids' is not supported when 'echo' is true and no output tokens are generated.",
        )
        refuse_if(
            bool(self.suffix) and (bool(self.echo) or not isinstance(self.prompt, str)),
            "suffix",
            "'suffix' needs one prompt that is text, and 'echo' must be false.",
        )

    @property
    def reports_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def generates_nothing(self) -> bool:
        """Whether the answer is about the prompt only. The engine then generates one token, which is not shown."""
        return self.max_tokens == 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the most likely tokens to report with each prompt token; None: no log probabilities."""
        if self.prompt_logprobs is not None or not self.echo:
            return self.prompt_logprobs
        return self.logprobs

    @property
    def ranks_choices(self) -> bool:
        """Whether more choices are generated than the answer has."""
        return self.best_of is not None and self.best_of > (self.n or 1)


@dataclass(frozen=True, kw_only=True)
class PreparedCompletion(Prepared):
    """A completion request as the engine takes it."""

    echoes: list[str]
    """For each prompt, the text to repeat before the output; empty without `echo`."""
    texts: list[str | None]
    """For each prompt, its text; None: it was given as token ids."""


async def prepare_completion(service: Service, body: CompletionRequest) -> PreparedCompletion:
    """Check a completion request, encode its prompts, and write the grammar of its outputs.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    body.check()
    embedded = await _read_embeds(service, body)  # what nobody could read is a 400, whichever model it is for
    service.require_model(body.model)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(
        max_tokens=1 if body.generates_nothing else max_tokens,
        logprobs=body.logprobs,
        defaults=service.sampling_defaults,
    )
    params = msgspec.structs.replace(params, prompt_logprobs=body.num_prompt_logprobs)
    if body.ranks_choices:
        assert body.best_of is not None
        params = msgspec.structs.replace(params, n=body.best_of)
        if params.logprobs is None and params.logprob_token_ids is None:
            params.logprobs = 0
    given = [] if body.prompt is None else list_prompts(body.prompt, "prompt")
    ids, echoes = await _encode_prompts(service, body, given)
    echoes = [""] * len(embedded) + echoes
    texts = [None] * len(embedded) + [prompt if isinstance(prompt, str) else None for prompt in given]
    _check_scores(body, ids, service.llm.model.builder.vocab_size)
    grammar = await make_answer_grammar(
        None,
        body.response_format,
        body.requested_form,
        service.llm.grammars,
        disable_any_whitespace=service.config.disable_any_whitespace,
    )
    return PreparedCompletion(
        prompts=[*embedded, *map(EncodedPrompt, ids)],
        params=params,
        param="prompt",
        grammar=grammar,
        echoes=echoes,
        texts=texts,
    )


async def _read_embeds(service: Service, body: CompletionRequest) -> list[EncodedPrompt]:
    """The prompts that are tensors.

    Raises:
        ApiError: 400, one cannot be read, or none are taken.
    """
    data = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    if len(data) > MAX_PROMPTS:
        raise bad_request(f"'prompt_embeds' has {len(data)} entries; at most {MAX_PROMPTS} are taken.", "prompt_embeds")
    prompts: list[EncodedPrompt] = []
    for one in data:
        ids, embeds = join_parts([await read_embeds(service, one)])
        if embeds is None:
            raise bad_request("A tensor of 'prompt_embeds' must have at least one row.", "prompt_embeds")
        prompts.append(EncodedPrompt(ids, embeds))
    return prompts


async def _encode_prompts(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]]
) -> tuple[list[list[int]], list[str]]:
    """For each prompt, its ids for the engine and the text to echo."""
    with_special = body.add_special_tokens is not False
    encoded: list[list[int]] = []
    echoes: list[str] = []
    if body.suffix and isinstance(prompts[0], str):
        prompts = [_insertion_prompt(service, prompts[0], body.suffix)]
    most = service.llm.model.max_model_len - 1
    for prompt in prompts:
        ids = await encode_prompt(service, prompt, with_special, truncates=body.truncate_prompt_tokens is not None)
        encoded.append(body.truncate_prompt(ids, most))
        if not body.echo or body.return_token_ids:
            echoes.append("")  # as in vLLM, the ids of the prompt stand for its text
        elif isinstance(prompt, str):
            echoes.append(prompt)
        elif len(prompt) > service.llm.model.max_model_len:
            echoes.append("")  # the request is refused below
        else:
            echoes.append(decode_tokens(service, prompt))
    return encoded, echoes


def _check_scores(body: CompletionRequest, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse a request whose answer would have too many log probabilities of prompts.

    Raises:
        ApiError: 400.
    """
    if (count := body.num_prompt_logprobs) is not None:
        total = (vocab_size if count == -1 else count + 1) * sum(map(len, prompts))
        refuse_if(
            total > MAX_PROMPT_LOGPROBS,
            "prompt",
            f"The answer would have {total} log probabilities of prompt tokens, and at most {MAX_PROMPT_LOGPROBS} are "
            "sent; ask for fewer in each request.",
        )


def _insertion_prompt(service: Service, prefix: str, suffix: str) -> str:
    """The prompt of the text between `prefix` and `suffix`."""
    prompt = middle_prompt(service.require_tokenizer(), prefix, suffix)
    refuse_if(prompt is None, "suffix", "'suffix' is not supported: this model has no tokens for insertion.")
    assert prompt is not None
    return prompt


def middle_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str | None:
    """The prompt of the text between `prefix` and `suffix`; None: the tokenizer has no tokens for this."""
    for form in _INSERTIONS:
        marks = form.replace("{prefix}", "{suffix}").split("{suffix}")
        if all(tokenizer.token_id(mark) is not None for mark in marks if mark):
            return form.format(prefix=prefix, suffix=suffix)
    return None
