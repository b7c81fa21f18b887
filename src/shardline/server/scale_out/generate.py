"""POST /inference/v1/generate: token ids to token ids; and an endpoint that ends such requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from shardline.api.logprobs import Logprob, logprobs_by_token
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.api.prompts import EncodedPrompt
from shardline.messages.request import TokenLogprobs
from shardline.receipts.receipt import Receipt
from shardline.server.documentation import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel, StrictRoute
from shardline.server.middleware import REQUEST_ID
from shardline.server.openai.answer_parts import ChatLogprobs, TokenPieces, Usage, chat_logprobs, usage_of
from shardline.server.openai.answer_to_chat import prepare_answer
from shardline.server.openai.chat.conversation import EncodedChat
from shardline.server.openai.generation import Generation, Prepared, SentChoice
from shardline.server.openai.ignored_fields import MAX_ID_CHARS
from shardline.server.openai.protocol import SamplingFields, StreamOptions, TokenIds, refuse_if
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.prompts import decode_tokens
from shardline.server.scale_out.prompt_scores import NamedRows, check_rows, score_rows
from shardline.server.service import Service
from shardline.server.sse import Events, EventStream, make_event

_PREFIX = "generate-tokens-"
MAX_ABORTS = 10_000
"""The most requests that are ended at once."""


class GenerateSampling(SamplingFields):
    """The `sampling_params` of a request, in vLLM's spelling. Fields that only another engine has are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    taken_here: ClassVar[frozenset[str]] = frozenset({"detokenize"})

    max_tokens: int | None = None
    """None: up to the model's maximum length."""
    logprobs: int | None = None
    detokenize: bool | None = None
    output_kind: Any = None
    prompt_logprob_token_ids: NamedRows | None = None
    prompt_logprob_start: int | None = None
    """The position of the first row."""


class GenerateRequest(RequestModel):
    """The body of POST /inference/v1/generate."""

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: GenerateSampling
    request_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    token_offsets: Any = None
    """Accepted, since rendered requests have it; it has no effect."""
    features: None = None
    """Of images and sounds, which no model here takes."""
    content_parts: None = None
    model: str | None = None
    reasoning_ended: bool | None = None
    """Whether a constrained output is constrained from its first token, though the model may reason."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    """Text: the answer has the output's text, too."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    def check(self) -> None:
        """Check the fields together.

        Raises:
            ApiError: 400, the fields contradict each other or ask for something unsupported.
        """
        sampling = self.sampling_params
        sampling.check_supported(streams=bool(self.stream))
        refuse_if(
            sampling.prompt_logprob_token_ids is not None and bool(self.stream),
            "prompt_logprob_token_ids",
            "prompt_logprob_token_ids are not available when stream=true.",
        )
        if sampling.prompt_logprob_start is not None and sampling.prompt_logprob_token_ids is None:
            raise bad_request("prompt_logprob_start requires prompt_logprob_token_ids.", "prompt_logprob_start")
        refuse_if(bool(sampling.use_beam_search), "use_beam_search", "Beam search needs a prompt of /v1/completions.")
        skips_text = sampling.detokenize is False
        if skips_text and sampling.stop:
            raise bad_request("stop strings are found in the text, so 'detokenize' must not be false.", "stop")
        if skips_text and self.output_mode == "text":
            raise bad_request("output_mode='text' needs 'detokenize' to be true.", "output_mode")


class TokenLogprob(msgspec.Struct, frozen=True):
    """How likely the model found a token."""

    token_id: int
    logprob: float
    rank: int


class GeneratedToken(TokenLogprob, frozen=True):
    """The chosen token at a position: `top_logprobs` has it first, and then the most likely ones."""

    top_logprobs: list[TokenLogprob]


class GeneratedLogprobs(msgspec.Struct, frozen=True):
    """The log probabilities of one choice."""

    content: list[GeneratedToken]


class GenerateChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice; in a chunk, what is new in it."""

    index: int
    token_ids: list[int]
    text: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: Any
    """`GeneratedLogprobs`, or `ChatLogprobs` with a text; None: the request did not ask for them."""
    finish_reason: str | None
    stop_reason: int | str | None
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The whole answer, or a chunk of a stream."""

    request_id: str
    created: int
    model: str
    output_mode: str
    choices: Sequence[GenerateChoice]
    usage: Usage | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: str | msgspec.UnsetType | None = msgspec.UNSET
    """See `score_rows`; a chunk has none."""
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


@dataclass
class GenerateWriter:
    """Writes the answer to one request, as a whole or in chunks."""

    service: Service
    body: GenerateRequest
    request_id: str

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self.service.llm.model.tokenizer)

    def write_whole(self, output: RequestOutput, scores: str | None) -> bytes:
        """The JSON of the whole answer. `scores`: those of `score_rows`; None: they were not asked for."""
        choices = [self._write_choice(SentChoice(), choice) for choice in output.outputs]
        return self._encode(
            [choice for choice in choices if choice is not None],
            usage_of([output]),
            prompt_logprobs=output.prompt_logprobs,
            prompt_token_id_logprobs=scores,
            prompt_token_ids=self._prompt_ids(output),
        )

    def write_chunks(self, generation: Generation) -> Events:
        """The events of a stream: each has new tokens of one choice, or its end."""
        options = self.body.stream_options or StreamOptions()
        sent = [SentChoice() for _ in range(self.body.sampling_params.n or 1)]
        prompt_ids = self._prompt_ids(generation.outputs[0])
        body = b""
        while (update := (yield body)) is not None:
            body = b""
            for choice in update[1].outputs:
                part = self._write_choice(sent[choice.index], choice)
                if part is not None:
                    usage = usage_of(generation.outputs) if options.counts_always else None
                    body += make_event(self._encode([part], usage, prompt_token_ids=prompt_ids))
                    prompt_ids = None
        if options.include_usage:
            yield make_event(self._encode([], usage_of(generation.outputs)))
        else:
            yield b""

    def _prompt_ids(self, output: RequestOutput) -> list[int] | None:
        return output.prompt_token_ids if self.body.return_token_ids else None

    def _write_choice(self, sent: SentChoice, choice: CompletionOutput) -> GenerateChoice | None:
        """What is new in a choice; None: nothing."""
        delta = sent.take_delta(choice, tokens_matter=True)
        if delta is None:
            return None
        as_text = self.body.output_mode == "text"
        logprobs: GeneratedLogprobs | ChatLogprobs | None = None
        if delta.token_logprobs is not None:
            write = chat_logprobs if as_text else _generated_logprobs
            logprobs = write(self._pieces, delta.token_ids, delta.token_logprobs)
        return GenerateChoice(
            index=choice.index,
            token_ids=delta.token_ids,
            text=delta.text if as_text else msgspec.UNSET,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            receipt=delta.receipt or msgspec.UNSET,
        )

    def _encode(self, choices: Sequence[GenerateChoice], usage: Usage | None, **fields: Any) -> bytes:
        return msgspec.json.encode(
            GenerateResponse(
                request_id=self.request_id,
                created=int(time.time()),
                model=self.service.name_of(self.body.model),
                output_mode=self.body.output_mode,
                choices=choices,
                usage=usage,
                **fields,
            )
        )


def _generated_logprobs(
    _: TokenPieces, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> GeneratedLogprobs:
    """Log probabilities by token id."""
    content = []
    for token_id, chosen in zip(token_ids, logprobs, strict=True):
        entries = logprobs_by_token(token_id, chosen, lambda _: None)
        top = [TokenLogprob(other, entry.logprob, entry.rank) for other, entry in entries.items()]
        content.append(GeneratedToken(token_id, chosen.logprob, chosen.rank, top))
    return GeneratedLogprobs(content)


async def _start(service: Service, body: GenerateRequest, request_id: str) -> Generation:
    """Admit a request."""
    sampling = body.sampling_params
    params = sampling.sampling_params(max_tokens=sampling.max_tokens, logprobs=sampling.logprobs)
    token_ids = sampling.truncate_prompt(body.token_ids)
    options: dict[str, Any] = {"priority": body.priority or 0, "cache_salt": body.cache_salt or "", "model": body.model}
    form = body.sampling_params.requested_form
    if form is None:
        only_ids = Prepared(prompts=[EncodedPrompt(token_ids)], params=params, param="token_ids")
        return await Generation.start(service, only_ids, request_id, **options)
    prompt = decode_tokens(service, token_ids)
    reasoning = None if body.reasoning_ended else service.chat.reasoning_parser
    prepared = await prepare_answer(
        service,
        EncodedChat(prompt, token_ids, None),
        params,
        sampling.response_format,
        reasoning=reasoning,
        requested_form=form,
        param="token_ids",
    )
    return await Generation.start(service, prepared, request_id, **options)


def base_request_id(request: Request, own: str | None) -> str:
    """The id by which a client names its request: that of the header, or of the body, or a new one."""
    known: str = request.scope[REQUEST_ID]
    return known if own is None or "x-request-id" in request.headers else own


class AbortRequest(RequestModel):
    """The body of POST /inference/v1/abort_requests."""

    request_ids: Annotated[list[str], Field(max_length=MAX_ABORTS, fail_fast=True)]


def generate_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/inference/v1/generate", responses=json_answers(GenerateResponse, streams=True))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue token ids. With `stream`, the answer is sent as server-sent events."""
        service.require_model(body.model)
        body.check()
        refuse_if(
            body.output_mode == "text" and service.llm.model.tokenizer is None,
            "output_mode",
            "output_mode='text' requires a tokenizer, and this server has none.",
        )
        sampling = body.sampling_params
        request_id = _PREFIX + base_request_id(request, body.request_id)
        rows, start = sampling.prompt_logprob_token_ids, sampling.prompt_logprob_start or 0
        prompt = sampling.truncate_prompt(body.token_ids)
        if rows is not None:
            check_rows(service, rows, start, prompt)
        generation = await _start(service, body, request_id)
        writer = GenerateWriter(service, body, request_id)
        if body.stream:
            return EventStream(writer.write_chunks(generation), generation, sampling.ignored_headers)
        async with generation:
            [output] = await wait_finished(generation)
        scores = None
        if rows is not None:  # the prompt's blocks are cached now
            scores = await score_rows(service, rows, start, prompt, request_id, body.model, body.cache_salt or "")
        whole = writer.write_whole(output, scores)
        return Response(whole, headers=sampling.ignored_headers, media_type="application/json")

    @router.post("/inference/v1/abort_requests", responses=json_answers(dict[str, Any]))
    async def abort_requests(body: AbortRequest) -> Response:
        """End requests of the endpoint above. Ids that are not known are ignored."""
        for request_id in body.request_ids:
            if request_id.startswith(_PREFIX):
                await service.llm.abort(request_id)
        return Response(b"{}", media_type="application/json")

    if service.config.tokens_only:
        router.add_api_route("/abort_requests", abort_requests, methods=["POST"], include_in_schema=False)
    return router
