"""POST /cohere/v2/chat."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.cohere.errors import PATH, error_event
from shardline.server.cohere.request import CohereChatRequest
from shardline.server.cohere.writer import CohereChatResponse, CohereError, CohereWriter
from shardline.server.documentation import json_answers
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_to_chat import PreparedChat, prepare_answer
from shardline.server.openai.generation import Generation
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream


async def prepare_cohere_chat(service: Service, body: CohereChatRequest) -> PreparedChat:
    """Check a request, render its conversation, and prepare its answer.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    service.require_model(body.model)
    params = body.sampling.sampling_params(
        max_tokens=body.max_tokens,
        logprobs=0 if body.logprobs else None,
        defaults=service.sampling_defaults,
    )
    fields = body.conversation_fields
    return await prepare_answer(
        service,
        await fields.encode_messages(service, body.chat_messages(), add_special_tokens=False),
        params,
        body.answer_form,
        reasoning=service.chat.reasoning_parser,
        max_reasoning_tokens=body.max_reasoning_tokens,
    )


def cohere_chat_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post(PATH, responses=json_answers(CohereChatResponse, streams=True, error=CohereError))
    async def create_cohere_chat(body: CohereChatRequest) -> Response:
        """Answer a conversation in Cohere's shape. With `stream`, the answer is sent as server-sent events."""
        chat = await prepare_cohere_chat(service, body)
        response_id = new_id("chat_")
        writer = CohereWriter(chat.answer_format, response_id, service.llm.model.tokenizer)
        generation = await Generation.start(service, chat, response_id, **body.sampling.queueing)
        if body.stream:
            events = writer.write_events(generation.outputs[0])
            return EventStream(events, generation, write_error=error_event)
        async with generation:
            [output] = await wait_finished(generation)
            # The texts of many tokens must not keep other streams waiting.
            whole = await asyncio.to_thread(writer.write_whole, output) if body.logprobs else writer.write_whole(output)
            return Response(whole, media_type="application/json")

    return router
