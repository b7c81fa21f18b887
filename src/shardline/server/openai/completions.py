"""POST /v1/completions: the continuation of a text or of token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.server.errors import ERROR_RESPONSES, bad_request
from shardline.server.in_flight import EventStream, make_event
from shardline.server.openai.answer_grammar import make_answer_grammar
from shardline.server.openai.generation import Delta, Generation, SentChoice
from shardline.server.openai.logprobs import CompletionLogprobs, CompletionLogprobsWriter, TokenPieces
from shardline.server.openai.protocol import MAX_CHOICES_PER_HTTP_REQUEST, SamplingFields, TokenIds, refuse_if
from shardline.server.openai.strict_json import StrictRoute
from shardline.server.openai.usage import Usage, usage_of
from shardline.server.request_log import answer_metrics
from shardline.server.service import Service, new_id
from shardline.types import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from shardline.api.async_llm import Prompt

MAX_PROMPTS = 2048
"""Largest number of prompts in one request, as at OpenAI."""

_DEFAULT_MAX_TOKENS = 16

Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: str | Texts | TokenIds | TokenIdLists
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
        refuse_if(
            bool(self.echo) and self.logprobs is not None,
            "logprobs",
            "Log probabilities of the prompt are not supported: set 'echo' to false or leave out 'logprobs'.",
        )
        self.check_supported()
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise bad_request("'best_of' must not be smaller than 'n'.", "best_of")
            refuse_if(
                bool(self.stream) and self.best_of > (self.n or 1),
                "best_of",
                "'best_of' larger than 'n' cannot be streamed: the choices are ranked when all of them are whole.",
            )
        refuse_if(bool(self.suffix), "suffix", "'suffix' (insertion) is not supported.")

    @property
    def ranks_choices(self) -> bool:
        """Whether more choices are generated than the answer has."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    def list_prompts(self) -> list[str | list[int]]:
        """The prompts as a list.

        Raises:
            ApiError: 400, there are none or too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("'prompt' must not be empty.", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # the first item tells a list of ids from a list of prompts
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request(
                f"'prompt' has {len(self.prompt)} entries; at most {MAX_PROMPTS} are taken in one request.", "prompt"
            )
        return list(self.prompt)


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice; in a chunk, what is new in it. The last three fields appear only on request."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logits_digests: list[str] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The whole answer, or a chunk of a stream: both have the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    metrics: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CompletionWriter:
    """Writes the answer to one request, as a whole or in chunks."""

    def __init__(self, service: Service, body: CompletionRequest, response_id: str, texts: Sequence[str]) -> None:
        self._body = body
        self._options = body.check_stream()
        self._id = response_id
        self._created = int(time.time())
        self._model = service.model_names[0]
        self._fingerprint = service.llm.fingerprint
        self._choices_per_prompt = body.n or 1
        self._texts = texts
        """For each prompt, the text to repeat before the output; empty without `echo`."""
        self._tokenizer = service.llm.tokenizer

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._tokenizer)

    def write_whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The JSON of the whole answer."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            ranked = _best_choices(output, self._choices_per_prompt) if self._body.ranks_choices else output.outputs
            for choice in ranked:
                delta = SentChoice().take_delta(choice, tokens_matter=True)
                assert delta is not None
                if self._body.logprobs is None:
                    delta.logprobs = None
                writer = self._logprobs_writer(prompt_index)
                choices.append(self._write_choice(prompt_index, output, choice, delta, writer, first=True))
        return self._encode_response(choices, usage_of(outputs), outputs)

    async def write_chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        body = self._body
        tokens_matter = body.logprobs is not None or bool(body.return_token_ids or body.logits_digest)
        choices = range(self._choices_per_prompt)
        sent = [[SentChoice() for _ in choices] for _ in self._texts]
        writers = [[self._logprobs_writer(prompt_index) for _ in choices] for prompt_index in range(len(self._texts))]
        no_usage = None if self._options.include_usage else msgspec.UNSET
        async for prompt_index, output in generation.updates():
            events = []
            for choice in output.outputs:
                sent_choice = sent[prompt_index][choice.index]
                first = sent_choice.num_tokens == 0
                delta = sent_choice.take_delta(choice, tokens_matter=tokens_matter)
                if delta is None:
                    continue
                writer = writers[prompt_index][choice.index]
                chunk = self._write_choice(prompt_index, output, choice, delta, writer, first=first)
                usage = usage_of(generation.outputs) if self._options.continuous_usage_stats else no_usage
                events.append(make_event(self._encode_response([chunk], usage)))
            if events:
                yield b"".join(events)
        if self._options.include_usage or body.return_metrics:
            outputs = generation.outputs
            usage = usage_of(outputs) if self._options.include_usage else msgspec.UNSET
            yield make_event(self._encode_response([], usage, outputs))

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
        with_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=prompt_index * self._choices_per_prompt + choice.index,
            text=self._texts[prompt_index] + delta.text if first else delta.text,
            logprobs=None if delta.logprobs is None else writer.write(delta.token_ids, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if with_ids else msgspec.UNSET,
            prompt_token_ids=output.prompt_token_ids if with_ids and first else msgspec.UNSET,
            logits_digests=msgspec.UNSET if delta.digests is None else delta.digests,
        )

    def _encode_response(
        self,
        choices: Sequence[CompletionChoice],
        usage: Usage | msgspec.UnsetType | None,
        finished: Sequence[RequestOutput] = (),
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
            )
        )


def _best_choices(output: RequestOutput, count: int) -> list[CompletionOutput]:
    """The choices with the largest mean log probability of their tokens, best first, numbered anew."""

    def score(choice: CompletionOutput) -> float:
        return sum(entry.logprob for entry in choice.logprobs or ()) / max(1, len(choice.token_ids))

    best = sorted(output.outputs, key=score, reverse=True)[:count]
    return [msgspec.structs.replace(choice, index=index) for index, choice in enumerate(best)]


async def _encode_prompts(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]]
) -> tuple[list[Prompt], list[str]]:
    """For each prompt, its ids for the engine and the text to echo."""
    with_special = body.add_special_tokens is not False
    encoded: list[Prompt] = []
    echoes: list[str] = []
    for prompt in prompts:
        ids = prompt
        if isinstance(prompt, str):
            ids = await service.encode_prompt(prompt, with_special)
        assert not isinstance(ids, str)
        encoded.append(body.truncate_prompt(ids))
        if not body.echo:
            echoes.append("")
        elif isinstance(prompt, str):
            echoes.append(prompt)
        else:
            echoes.append(service.decode_tokens(prompt, skip_special_tokens=body.skip_special_tokens is not False))
    return encoded, echoes


def completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", responses=ERROR_RESPONSES)
    async def create_completion(body: CompletionRequest) -> Response:
        """Continue a text. With `stream`, the answer is sent as server-sent events."""
        service.require_model(body.model)
        body.check()
        params = body.sampling_params(
            max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs
        )
        if body.ranks_choices:
            assert body.best_of is not None
            params = msgspec.structs.replace(params, n=body.best_of, logprobs=params.logprobs or 0)
        response_id = new_id("cmpl")
        prompts, echoes = await _encode_prompts(service, body, body.list_prompts())
        grammar = await make_answer_grammar(
            None, body.response_format, body.requested_form, service.llm.prepare_grammar
        )
        writer = CompletionWriter(service, body, response_id, echoes)
        generation = await Generation.start(
            service,
            prompts,
            params,
            request_id=response_id,
            prompt_param="prompt",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            grammar=grammar,
        )
        if body.stream:
            return EventStream(writer.write_chunks(generation), generation, body.ignored_headers)
        async with generation:
            whole = writer.write_whole(await generation.wait_finished())
            return Response(whole, headers=body.ignored_headers, media_type="application/json")

    return router
