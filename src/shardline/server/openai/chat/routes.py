"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.documentation import json_answers
from shardline.server.json_body import StrictRoute
from shardline.server.openai.beams import search_beams
from shardline.server.openai.chat.request import ChatRequest, prepare_chat
from shardline.server.openai.chat.writer import ChatResponse, ChatWriter
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream


def chat_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=json_answers(ChatResponse, streams=True))
    async def create_chat_completion(body: ChatRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events."""
        chat = await prepare_chat(service, body)
        response_id = new_id("chatcmpl-")
        writer = ChatWriter(service, body, response_id, chat.answer_format)
        if body.use_beam_search:
            [found] = await search_beams(
                service,
                body,
                [chat.prompt],
                chat.params,
                request_id=response_id,
                prompt_param=chat.param,
                has_form=chat.has_form,
            )
            return Response(writer.write_whole(found), headers=body.ignored_headers, media_type="application/json")
        generation = await chat.start(service, response_id, **body.queueing)
        if body.stream:
            return EventStream(writer.write_chunks(generation), generation, body.ignored_headers)
        async with generation:
            [output] = await generation.wait_finished()
            if body.logprobs:  # it may take long
                whole = await asyncio.to_thread(writer.write_whole, output)
            else:
                whole = writer.write_whole(output)
            return Response(whole, headers=body.ignored_headers, media_type="application/json")

    return router
