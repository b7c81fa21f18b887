"""POST /v1/completions: the continuation of a text or of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.api.outputs import CompletionOutput, Logprob, RequestOutput
from shardline.api.prompt_embeds import join_parts
from shardline.api.requests import MixedPrompt
from shardline.messages.request import TokenLogprobs
from shardline.sampling_params import SamplingParams
from shardline.server.answer_schema import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import StrictRoute
from shardline.server.observer import answer_metrics
from shardline.server.openai.answer_format import make_answer_grammar
from shardline.server.openai.answer_parts import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    TokenPieces,
    Usage,
    join_logprobs,
    usage_of,
)
from shardline.server.openai.beams import search_beams
from shardline.server.openai.fill_in_middle import middle_prompt
from shardline.server.openai.generation import Delta, Generation, SentChoice
from shardline.server.openai.protocol import MAX_CHOICES_PER_HTTP_REQUEST, SamplingFields, TokenIds, refuse_if
from shardline.server.service import Service, new_id
from shardline.server.sse import Events, EventStream, make_event

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
    limit = service.most_encoded if truncates else None
    return await service.encode_prompt(prompt, add_special_tokens, max_tokens=limit)


_DEFAULT_MAX_TOKENS = 16


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
                raise bad_request("Missing required parameter: 'prompt'.", "prompt", "missing_required_parameter")
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


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice; in a chunk, what is new in it, without the last field. The digests are there only on request."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logits_digests: list[str] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType | None = msgspec.UNSET


MAX_PROMPT_LOGPROBS = 500_000
"""The most log probabilities of the prompts in one answer: they fill memory, and take long to write."""


class CompletionResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The whole answer, or a chunk of a stream: both have the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET
    metrics: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CompletionWriter:
    """Writes the answer to one request, as a whole or in chunks."""

    def __init__(self, service: Service, body: CompletionRequest, response_id: str, texts: Sequence[str]) -> None:
        self._body = body
        self._options = body.check_stream(with_usage=service.config.enable_force_include_usage)
        self._id, self._created = body.origin(response_id)
        self._model = service.model_names[0]
        self._fingerprint = service.llm.model.fingerprint
        self._choices_per_prompt = body.n or 1
        self._texts = texts
        """For each prompt, the text to repeat before the output; empty without `echo`."""
        self._tokenizer = service.llm.model.tokenizer
        asked = body.return_tokens_as_token_ids
        self._tokens_as_ids = service.config.return_tokens_as_token_ids if asked is None else asked

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._tokenizer, as_ids=self._tokens_as_ids)

    def write_whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The JSON of the whole answer."""
        if self._body.generates_nothing:
            outputs = [_without_tokens(output) for output in outputs]
        choices = []
        for prompt_index, output in enumerate(outputs):
            ranked = _best_choices(output, self._choices_per_prompt) if self._body.ranks_choices else output.outputs
            for choice in ranked:
                delta = SentChoice().take_delta(choice, tokens_matter=True)
                assert delta is not None
                if self._body.logprobs is None:
                    delta.logprobs = None
                writer = self._logprobs_writer(prompt_index)
                whole = self._write_choice(prompt_index, output, choice, delta, writer, first=True)
                scores = None if self._body.prompt_logprobs is None else output.prompt_logprobs
                choices.append(msgspec.structs.replace(whole, prompt_logprobs=scores))
        return self._encode_response(choices, self._usage(outputs), outputs, service_tier=None, kv_transfer_params=None)

    def write_chunks(self, generation: Generation) -> Events:
        """The events of a stream."""
        body = self._body
        tokens_matter = body.logprobs is not None or bool(body.return_token_ids or body.logits_digest)
        choices = range(self._choices_per_prompt)
        sent = [[SentChoice() for _ in choices] for _ in self._texts]
        writers = [[self._logprobs_writer(prompt_index) for _ in choices] for prompt_index in range(len(self._texts))]
        no_usage = None if self._options.include_usage else msgspec.UNSET
        events: list[bytes] = []
        while (update := (yield b"".join(events))) is not None:
            prompt_index, output = update
            if body.generates_nothing:
                output = _without_tokens(output)
            events = []
            for choice in output.outputs:
                sent_choice = sent[prompt_index][choice.index]
                first = sent_choice.num_tokens == 0
                delta = sent_choice.take_delta(choice, tokens_matter=tokens_matter)
                if delta is None:
                    continue
                writer = writers[prompt_index][choice.index]
                chunk = self._write_choice(prompt_index, output, choice, delta, writer, first=first)
                usage = self._usage(generation.outputs) if self._options.counts_always else no_usage
                events.append(make_event(self._encode_response([chunk], usage)))
        yield self._write_ending(generation.outputs)

    def _write_ending(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The chunk with the usage and the metrics, if the request asked for either."""
        if not (self._options.include_usage or self._body.return_metrics):
            return b""
        usage = self._usage(outputs) if self._options.include_usage else msgspec.UNSET
        return make_event(self._encode_response([], usage, outputs))

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        return usage_of([_without_tokens(output) for output in outputs] if self._body.generates_nothing else outputs)

    def _logprobs_writer(self, prompt_index: int) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._pieces, len(self._texts[prompt_index]))

    def _write_choice(
        self,
        prompt_index: int,
        output: RequestOutput,
        choice: CompletionOutput,
        delta: Delta,
        writer: CompletionLogprobsWriter,
        *,
        first: bool,
    ) -> CompletionChoice:
        body = self._body
        with_ids = bool(body.return_token_ids)
        logprobs = None if delta.logprobs is None else writer.write(delta.token_ids, delta.logprobs)
        if first and body.echo and body.logprobs is not None:
            scores = output.prompt_token_logprobs or []
            count = None if body.logprobs == -1 else body.logprobs
            own = [TokenLogprobs(s.logprob, s.rank, s.top_ids[:count], s.top_logprobs[:count]) for s in scores]
            before = CompletionLogprobsWriter(self._pieces, len(self._texts[prompt_index]))
            prompt = before.write_prompt(output.prompt_token_ids, own)
            logprobs = prompt if logprobs is None else join_logprobs(prompt, logprobs)
        return CompletionChoice(
            index=prompt_index * self._choices_per_prompt + choice.index,
            text=self._texts[prompt_index] + delta.text if first else delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if with_ids else None,
            prompt_token_ids=output.prompt_token_ids if with_ids and first else None,
            logits_digests=msgspec.UNSET if delta.digests is None else delta.digests,
        )

    def _encode_response(
        self,
        choices: Sequence[CompletionChoice],
        usage: Usage | msgspec.UnsetType | None,
        finished: Sequence[RequestOutput] = (),
        **fields: Any,
    ) -> bytes:
        return msgspec.json.encode(
            CompletionResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
                metrics=answer_metrics(finished) if self._body.return_metrics and finished else msgspec.UNSET,
                **fields,
            )
        )


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """The output as if nothing had been generated."""
    ended = [
        CompletionOutput(index=choice.index, finish_reason=choice.finish_reason and "length")
        for choice in output.outputs
    ]
    return msgspec.structs.replace(output, outputs=ended)


def _best_choices(output: RequestOutput, count: int) -> list[CompletionOutput]:
    """The choices with the largest mean log probability of their tokens, best first, numbered anew."""

    def score(choice: CompletionOutput) -> float:
        return (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids))

    best = sorted(output.outputs, key=score, reverse=True)[:count]
    return [msgspec.structs.replace(choice, index=index) for index, choice in enumerate(best)]


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
            echoes.append(service.decode_tokens(prompt, skip_special_tokens=False))
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


@dataclass(frozen=True)
class PreparedCompletion:
    """A completion request as the engine takes it."""

    params: SamplingParams
    prompts: list[list[int] | MixedPrompt]
    echoes: list[str]
    """For each prompt, the text to repeat before the output; empty without `echo`."""
    texts: list[str | None]
    """For each prompt, its text; None: it was given as token ids."""
    grammar: str
    """Of the outputs; empty: they may be any text."""


async def prepare_completion(service: Service, body: CompletionRequest) -> PreparedCompletion:
    """Check a completion request, encode its prompts, and write the grammar of its outputs.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    service.require_model(body.model)
    body.check()
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(
        max_tokens=1 if body.generates_nothing else max_tokens,
        logprobs=body.logprobs,
        defaults=service.llm.model.sampling_defaults,
    )
    params = msgspec.structs.replace(params, prompt_logprobs=body.num_prompt_logprobs)
    if body.ranks_choices:
        assert body.best_of is not None
        params = msgspec.structs.replace(params, n=body.best_of)
        if params.logprobs is None and params.logprob_token_ids is None:
            params.logprobs = 0
    given = [] if body.prompt is None else list_prompts(body.prompt, "prompt")
    embedded = await _read_embeds(service, body)
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
    return PreparedCompletion(params, [*embedded, *ids], echoes, texts, grammar)


async def _read_embeds(service: Service, body: CompletionRequest) -> list[MixedPrompt]:
    """The prompts that are tensors.

    Raises:
        ApiError: 400, one cannot be read, or none are taken.
    """
    data = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    if len(data) > MAX_PROMPTS:
        raise bad_request(f"'prompt_embeds' has {len(data)} entries; at most {MAX_PROMPTS} are taken.", "prompt_embeds")
    prompts: list[MixedPrompt] = []
    for one in data:
        ids, embeds = join_parts([await service.read_embeds(one)])
        if embeds is None:
            raise bad_request("A tensor of 'prompt_embeds' must have at least one row.", "prompt_embeds")
        prompts.append({"prompt_token_ids": ids, "embeds": embeds, "prompt": None})
    return prompts


def completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", responses=json_answers(CompletionResponse, streams=True))
    async def create_completion(body: CompletionRequest) -> Response:
        """Continue a text. With `stream`, the answer is sent as server-sent events."""
        completion = await prepare_completion(service, body)
        response_id = new_id("cmpl-")
        writer = CompletionWriter(service, body, response_id, completion.echoes)
        if body.use_beam_search:
            found = await search_beams(
                service,
                body,
                completion.prompts,
                completion.params,
                request_id=response_id,
                prompt_param="prompt",
                has_form=bool(completion.grammar),
            )
            return Response(writer.write_whole(found), headers=body.ignored_headers, media_type="application/json")
        generation = await Generation.start(
            service,
            completion.prompts,
            completion.params,
            request_id=response_id,
            prompt_param="prompt",
            **body.queueing,
            grammar=completion.grammar,
            resume=body.resume,
        )
        if body.stream:
            return EventStream(generation.mark(writer.write_chunks(generation)), generation, body.ignored_headers)
        async with generation:
            outputs = await generation.wait_finished()
            if body.logprobs is None and body.num_prompt_logprobs is None:
                whole = writer.write_whole(outputs)
            else:  # it may take long
                whole = await asyncio.to_thread(writer.write_whole, outputs)
            return Response(whole, headers=body.ignored_headers, media_type="application/json")

    return router
