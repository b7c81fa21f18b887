"""POST /v1/messages, its count of tokens, and its rendered requests."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.anthropic.errors import error_event
from shardline.server.anthropic.request import MessagesRequest, PromptFields
from shardline.server.anthropic.writer import MessageError, MessageObject, MessageWriter
from shardline.server.documentation import json_answers
from shardline.server.errors import ApiError
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_to_chat import PreparedChat, prepare_answer
from shardline.server.openai.chat.conversation import EncodedChat
from shardline.server.openai.generation import Generation
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream


class TokenCount(msgspec.Struct, frozen=True):
    """How many tokens a prompt has."""

    input_tokens: int


async def _encode(service: Service, body: PromptFields) -> EncodedChat:
    """The prompt of a request. If the template takes what the system says at the beginning only, it is put there."""
    service.require_model(body.model)
    fields = body.conversation_fields
    try:
        return await fields.encode_messages(service, body.chat_messages(), add_special_tokens=False)
    except ApiError:
        if not body.has_inline_system:
            raise
    merged = body.chat_messages(merge_system=True)
    return await fields.encode_messages(service, merged, add_special_tokens=False)


async def prepare_message(service: Service, body: MessagesRequest) -> PreparedChat:
    """Check a request, render its conversation, and prepare its answer.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    fields = body.sampling
    fields.check_supported()
    params = fields.sampling_params(max_tokens=body.max_tokens, logprobs=None, defaults=service.sampling_defaults)
    chat = await _encode(service, body)
    return await prepare_answer(
        service,
        chat,
        params,
        body.response_format,
        reasoning=service.chat.reasoning_parser,
        max_reasoning_tokens=body.max_reasoning_tokens,
        format_param="output_config.format",
    )


def message_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/messages", responses=json_answers(MessageObject, streams=True, error=MessageError))
    async def create_message(body: MessagesRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events."""
        chat = await prepare_message(service, body)
        fields = body.sampling
        message_id, _ = fields.origin(new_id("msg_"))
        cached_block = service.llm.model.block_size if service.llm.config.cache.enable_prefix_caching else None
        writer = MessageWriter(chat.answer_format, message_id, service.name_of(body.model), cached_block)
        generation = await Generation.start(service, chat, message_id, **fields.admission)
        if body.stream:
            events = generation.mark(writer.write_events(generation.outputs[0]))
            return EventStream(events, generation, write_error=error_event, done=b"")
        async with generation:
            [output] = await wait_finished(generation)
            return Response(writer.write_whole(output), media_type="application/json")

    @router.post("/v1/messages/count_tokens", responses=json_answers(TokenCount, error=MessageError))
    async def count_tokens(body: PromptFields) -> Response:
        """The number of tokens of a prompt."""
        chat = await _encode(service, body)
        return Response(msgspec.json.encode(TokenCount(len(chat.token_ids))), media_type="application/json")

    return router
