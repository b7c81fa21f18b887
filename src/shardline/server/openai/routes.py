"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.documentation import json_answers
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_to_chat import PreparedChat
from shardline.server.openai.beams import search_beams
from shardline.server.openai.chat.request import ChatRequest, prepare_chat
from shardline.server.openai.chat.shapes import ChatResponse
from shardline.server.openai.chat.writer import ChatWriter
from shardline.server.openai.completions.request import CompletionRequest, PreparedCompletion, prepare_completion
from shardline.server.openai.completions.writer import CompletionResponse, CompletionWriter
from shardline.server.openai.generation import Generation
from shardline.server.openai.ignored_fields import IGNORED_NAMES
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream


def generating_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=json_answers(ChatResponse, streams=True))
    async def create_chat_completion(body: ChatRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events."""
        chat = await prepare_chat(service, body)
        request_id = new_id("chatcmpl-")
        return await _answer(service, body, chat, ChatWriter(service, body, request_id, chat.answer_format), request_id)

    @router.post("/v1/completions", responses=json_answers(CompletionResponse, streams=True))
    async def create_completion(body: CompletionRequest) -> Response:
        """Continue a text. With `stream`, the answer is sent as server-sent events."""
        completion = await prepare_completion(service, body)
        request_id = new_id("cmpl-")
        return await _answer(
            service, body, completion, CompletionWriter(service, body, request_id, completion.echoes), request_id
        )

    return router


async def _answer(
    service: Service,
    body: ChatRequest | CompletionRequest,
    prepared: PreparedChat | PreparedCompletion,
    writer: ChatWriter | CompletionWriter,
    request_id: str,
) -> Response:
    ignored = {} if body.model_fields_set.isdisjoint(IGNORED_NAMES) else body.ignored_headers
    if body.use_beam_search:
        outputs = await search_beams(
            service,
            body,
            prepared.prompts,
            prepared.params,
            request_id=request_id,
            prompt_param=prepared.param,
            has_form=prepared.has_form,
        )
        whole = writer.write_whole(outputs)
    else:
        generation = await Generation.start(service, prepared, request_id, **body.admission)
        if body.stream:
            return EventStream(generation.mark(writer.write_chunks(generation)), generation, ignored)
        async with generation:
            outputs = await wait_finished(generation)
            whole = (
                await asyncio.to_thread(writer.write_whole, outputs)
                if writer.takes_long
                else writer.write_whole(outputs)
            )
    return Response(whole, headers=ignored, media_type="application/json")
