"""POST …/derender: the answer of /inference/v1/generate as the endpoint that rendered the request would write it.

Nothing is kept between the chunks of a stream: its client sends back every token so far, and they are read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.api.outputs import RequestOutput
from shardline.sampling_params import SamplingParams
from shardline.server.documentation import json_answers
from shardline.server.errors import missing_parameter
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.chat.request import ChatRequest, TransferParams, prepare_chat
from shardline.server.openai.chat.shapes import ChatResponse
from shardline.server.openai.chat.writer import ChatWriter
from shardline.server.openai.completions.request import CompletionRequest
from shardline.server.openai.completions.writer import CompletionResponse, CompletionWriter
from shardline.server.openai.generation import Generation
from shardline.server.openai.protocol import refuse_if
from shardline.server.scale_out.derender_bodies import (
    DerenderBody,
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedChunk,
    StreamState,
    TokenAnswer,
    TokenChoice,
)
from shardline.server.scale_out.replay import (
    add_fields,
    check_tokens,
    join_events,
    open_reader,
    read_chunk,
    read_whole,
)
from shardline.server.service import Service

_UNUSED: dict[str, Any] = dict.fromkeys(("stream", "stream_options", "return_metrics", "logits_digest", "echo"))
"""Fields of a rendered request whose answer is not in tokens."""


@dataclass
class _Replayed:
    outputs: list[RequestOutput]


def _replayed(outputs: list[RequestOutput]) -> Generation:
    """In place of a generation, of which writers need only the outputs."""
    return cast("Generation", _Replayed(outputs))


def _answer_whole(
    answers: Sequence[TokenAnswer],
    whole: dict[str, Any],
    prompt_tokens: int,
    response: type[ChatResponse | CompletionResponse],
) -> Response:
    """The answer for the client; what is not of tokens is as it came, if all answers have the same."""
    first, *others = [answer.model_extra or {} for answer in answers]
    for name in response.__struct_fields__:
        if whole.get(name) is None and all(other.get(name) == first.get(name) for other in others):
            whole[name] = first.get(name)
    whole["usage"] = _usage(whole["usage"], prompt_tokens, sum(map(_count_tokens, answers)))
    return Response(msgspec.json.encode(whole), media_type="application/json")


def _answer_chunk(
    service: Service, body: DerenderBody, chunk: TokenAnswer, kind: str, events: bytes, prompt_tokens: int | None
) -> Response:
    """The chunk for the client, with the state of the next one. `kind`: what the chunk is."""
    nothing: dict[str, Any] = {"delta": {}} if kind == "chat.completion.chunk" else {"text": ""}
    event: dict[str, Any] = {
        "id": chunk.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": service.name_of(body.model),
        "system_fingerprint": service.llm.model.fingerprint,
        "choices": [{**nothing, "logprobs": None, "finish_reason": None} for _ in chunk.choices],
    }
    event = add_fields(event, join_events(events))
    state = body.stream_state or StreamState()
    ids, lengths = list(state.output_token_ids), list(state.output_chunk_lens)
    for choice, written in zip(chunk.choices, event["choices"], strict=True):
        written["index"] = choice.index
        if choice.token_ids:
            ids += choice.token_ids
            lengths.append(len(choice.token_ids))
    if chunk.usage is not None:
        count = prompt_tokens if prompt_tokens is not None else chunk.usage.prompt_tokens or 0
        event["usage"] = _usage({}, count, chunk.usage.completion_tokens or 0)
    if metrics := (chunk.model_extra or {}).get("metrics"):
        event["metrics"] = metrics
    derendered = DerenderedChunk(event, {"output_token_ids": ids, "output_chunk_lens": lengths})
    return Response(msgspec.json.encode(derendered), media_type="application/json")


def _place(written: dict[str, Any], index: int, choice: TokenChoice) -> None:
    """Give a choice its index, and no log probabilities of tokens that came without."""
    written["index"] = index
    if written.get("logprobs") and choice.logprobs is not None:
        count = len(choice.logprobs.content or ())
        logprobs: dict[str, Any] = written["logprobs"]
        written["logprobs"] = {n: v[:count] if isinstance(v, list) else v for n, v in logprobs.items()}


def _usage(known: dict[str, Any], prompt: int, completion: int) -> dict[str, Any]:
    return {**known, "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _count_prompt(given: int | None, ids: Sequence[int] | None) -> int:
    return len(ids or ()) if given is None else given


def _count_tokens(answer: TokenAnswer) -> int:
    return sum(len(choice.token_ids or ()) for choice in answer.choices)


def derender_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions/derender", responses=json_answers(ChatResponse))
    async def derender_chat(body: DerenderChatRequest) -> Response:
        """A chat completion of tokens. With `stream`, one chunk of it, and the state of the next one."""
        service.require_model(body.model)
        answer = body.chunk() if body.stream else body.generate_response
        if answer is None:
            raise missing_parameter("generate_response")
        ids = answer.prompt_token_ids if body.prompt_token_ids is None else body.prompt_token_ids
        check_tokens(service, ids or (), None, "the prompt")
        reads = service.chat.reasoning_parser is not None or service.config.tool_call_parser != "auto"
        refuse_if(
            reads and body.chat_request is None,
            "chat_request",
            "'chat_request' is required where answers are parsed: it says what may be in them.",
        )
        refuse_if(
            reads and bool(body.stream) and body.prompt_token_ids is None,
            "prompt_token_ids",
            "'prompt_token_ids' are required where answers are parsed: a prompt may end inside reasoning.",
        )
        request = body.chat_request or ChatRequest.model_validate({"messages": [{"role": "user", "content": ""}]})
        most = request.top_logprobs if request.logprobs else None
        has_scores = any(choice.logprobs is not None for choice in answer.choices)
        request = request.model_copy(
            update={**_UNUSED, "n": max(1, len(answer.choices)), "logprobs": has_scores, "model": body.model}
            | ({"kv_transfer_params": TransferParams(prompt_token_ids=list(ids))} if ids else {})
        )
        if body.chat_request is None:
            form, params = AnswerFormat(service.require_tokenizer(), ""), SamplingParams()
        else:
            chat = await prepare_chat(service, request)
            form, params, ids = chat.answer_format, chat.params, ids or chat.token_ids
        reader = open_reader(service, ids, params, len(answer.choices), has_scores, form.shown_token_ids)
        writer = ChatWriter(service, request, answer.request_id, form)
        if body.stream:
            events = writer.write_chunks(_replayed([reader.output]))
            begun = await asyncio.to_thread(read_chunk, service, body, answer, reader, events, most)
            return _answer_chunk(service, body, answer, "chat.completion.chunk", begun, body.prompt_tokens)

        def write() -> bytes:
            read_whole(service, answer, reader, most)
            return writer.write_whole([reader.output])

        whole: dict[str, Any] = msgspec.json.decode(await asyncio.to_thread(write))
        for written, choice in zip(whole["choices"], answer.choices, strict=True):
            _place(written, choice.index, choice)
        return _answer_whole([answer], whole, _count_prompt(body.prompt_tokens, body.prompt_token_ids), ChatResponse)

    @router.post("/v1/completions/derender", responses=json_answers(CompletionResponse))
    async def derender_completion(body: DerenderCompletionRequest) -> Response:
        """A completion of tokens. With `stream`, one chunk of it, and the state of the next one."""
        service.require_model(body.model)
        answers = [body.chunk()] if body.stream else body.generate_responses
        if answers is None:
            raise missing_parameter("generate_responses")
        prompts, counts = body.prompts(len(answers)), body.counts(len(answers))
        request = body.completion_request or CompletionRequest.model_validate({"prompt": ""})
        most = request.logprobs
        has_scores = any(choice.logprobs is not None for answer in answers for choice in answer.choices)
        num_choices = max(1, *(len(answer.choices) for answer in answers))
        request = request.model_copy(
            update={**_UNUSED, "n": num_choices, "logprobs": 0 if has_scores else None, "best_of": None}
            | {"model": body.model, "prompt_embeds": None}
        )
        params = request.sampling_params(max_tokens=None, logprobs=None, defaults=service.sampling_defaults)
        readers = []
        for answer, ids in zip(answers, prompts, strict=True):
            check_tokens(service, ids or (), None, "the prompt")
            ids = answer.prompt_token_ids if ids is None else ids
            readers.append(open_reader(service, ids, params, len(answer.choices), has_scores, frozenset()))
        writer = CompletionWriter(service, request, answers[0].request_id, [""] * len(answers))
        if body.stream:
            events = writer.write_chunks(_replayed([readers[0].output]))
            begun = await asyncio.to_thread(read_chunk, service, body, answers[0], readers[0], events, most)
            return _answer_chunk(service, body, answers[0], "text_completion", begun, counts[0])

        def write() -> bytes:
            for answer, reader in zip(answers, readers, strict=True):
                read_whole(service, answer, reader, most)
            return writer.write_whole([reader.output for reader in readers])

        whole: dict[str, Any] = msgspec.json.decode(await asyncio.to_thread(write))
        choices = [choice for answer in answers for choice in answer.choices]
        for index, (written, choice) in enumerate(zip(whole["choices"], choices, strict=True)):
            _place(written, index, choice)
        return _answer_whole(answers, whole, sum(map(_count_prompt, counts, prompts)), CompletionResponse)

    return router
