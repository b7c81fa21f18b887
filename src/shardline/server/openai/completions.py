"""POST /v1/completions: text or token ids in, their continuation out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.server.errors import bad_request
from shardline.server.openai.generation import Delta, Generation, Progress
from shardline.server.openai.logprobs import CompletionLogprobs, CompletionLogprobsWriter, TokenPieces
from shardline.server.openai.protocol import ERRORS, SamplingFields, TokenIds, Usage, refuse, usage_of
from shardline.server.routing import StrictRoute
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream, event
from shardline.types import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from shardline.api.async_llm import Prompt

MAX_PROMPTS = 2048
"""Most prompts in one request, as at OpenAI."""

_DEFAULT_MAX_TOKENS = 16

Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: str | Texts | TokenIds | TokenIdLists
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raises:
        ApiError: 400, the fields contradict each other or ask for what is not supported.
        """
        refuse(
            [
                (
                    bool(self.echo) and self.logprobs is not None,
                    "logprobs",
                    "Log probabilities of the prompt are not supported: set 'echo' to false or leave out 'logprobs'.",
                ),
                (
                    self.best_of not in (None, self.n or 1),
                    "best_of",
                    "'best_of' is not supported unless it equals 'n': ask for 'n' choices and rank them yourself.",
                ),
                (bool(self.suffix), "suffix", "'suffix' (insertion) is not supported."),
            ]
        )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several.

        Raises:
            ApiError: 400, there are none or too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("'prompt' must not be empty.", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # its first item tells which list it is
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request(
                f"'prompt' has {len(self.prompt)} entries; at most {MAX_PROMPTS} are taken in one request.", "prompt"
            )
        return list(self.prompt)


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice, or what is new of it in a stream. The last four fields appear only where they were asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logits_digests: list[str] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The answer, or a chunk of it: OpenAI gives both the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionWriter:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, service: Service, body: CompletionRequest, response_id: str, texts: Sequence[str]) -> None:
        self._body = body
        self._options = body.check_stream()
        self._id = response_id
        self._created = int(time.time())
        self._model = service.model_names[0]
        self._fingerprint = service.llm.fingerprint
        self._choices_per_prompt = body.n or 1
        self._texts = texts
        """Per prompt, the text to repeat before the output; empty where there is nothing to echo."""
        self._pieces = TokenPieces(service.llm.tokenizer)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The JSON of the whole answer."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            for choice in output.outputs:
                delta = Progress().advance(choice, tokens_matter=True)
                assert delta is not None
                writer = self._logprobs_writer(prompt_index)
                choices.append(self._choice(prompt_index, output, choice, delta, writer, first=True))
        return self._encode(choices, usage_of(outputs))

    async def chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        body = self._body
        tokens_matter = body.logprobs is not None or bool(body.return_token_ids or body.logits_digest)
        choices = range(self._choices_per_prompt)
        progress = [[Progress() for _ in choices] for _ in self._texts]
        writers = [[self._logprobs_writer(prompt_index) for _ in choices] for prompt_index in range(len(self._texts))]
        no_usage = None if self._options.include_usage else msgspec.UNSET
        async for prompt_index, output in generation.events():
            events = []
            for choice in output.outputs:
                sent = progress[prompt_index][choice.index]
                first = sent.num_tokens == 0
                delta = sent.advance(choice, tokens_matter=tokens_matter)
                if delta is None:
                    continue
                writer = writers[prompt_index][choice.index]
                chunk = self._choice(prompt_index, output, choice, delta, writer, first=first)
                usage = usage_of(generation.outputs) if self._options.continuous_usage_stats else no_usage
                events.append(event(self._encode([chunk], usage)))
            if events:
                yield b"".join(events)
        if self._options.include_usage:
            yield event(self._encode([], usage_of(generation.outputs)))

    def _logprobs_writer(self, prompt_index: int) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._pieces, len(self._texts[prompt_index]))

    def _choice(
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

    def _encode(self, choices: Sequence[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        return msgspec.json.encode(
            CompletionResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage,
            )
        )


async def _prepare(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]]
) -> tuple[list[Prompt], list[str]]:
    """Per prompt, what the engine gets, and the text to echo."""
    with_special = body.add_special_tokens is not False
    prepared: list[Prompt] = []
    echoes: list[str] = []
    for prompt in prompts:
        ids = await service.encode(prompt, with_special) if isinstance(prompt, str) else prompt
        prepared.append(ids)
        if not body.echo:
            echoes.append("")
        elif isinstance(prompt, str):
            echoes.append(prompt)
        else:
            echoes.append(service.decode(prompt, skip_special_tokens=body.skip_special_tokens is not False))
    return prepared, echoes


def completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", responses=ERRORS)
    async def create_completion(body: CompletionRequest) -> Response:
        """Continue a text. With `stream`, the answer comes as server-sent events."""
        service.require_model(body.model)
        body.check()
        params = body.sampling(
            max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs
        )
        response_id = new_id("cmpl")
        prompts, echoes = await _prepare(service, body, body.prompts())
        writer = CompletionWriter(service, body, response_id, echoes)
        generation = await Generation.start(
            service,
            prompts,
            params,
            request_id=response_id,
            prompt_param="prompt",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        if body.stream:
            return EventStream(writer.chunks(generation), generation)
        async with generation:
            return Response(writer.whole(await generation.finished()), media_type="application/json")

    return router
