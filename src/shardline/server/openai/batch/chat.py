"""POST /v1/chat/completions/batch: several conversations in one request, as vLLM has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.server.documentation import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import StrictRoute
from shardline.server.openai.chat.messages import Messages
from shardline.server.openai.chat.request import ChatRequest, prepare_chat
from shardline.server.openai.chat.shapes import ChatResponse
from shardline.server.openai.chat.writer import ChatWriter
from shardline.server.openai.generation import Generation
from shardline.server.openai.protocol import refuse_if
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.service import Service, new_id

T = TypeVar("T")

MAX_CONVERSATIONS = 1024
"""The most conversations of one request: more would keep other streams waiting for longer than they may."""


class BatchedChatRequest(ChatRequest):
    """The body: all fields of a chat, for each conversation in `messages`."""

    messages: Annotated[  # type: ignore[assignment]
        list[Messages], Field(min_length=1, max_length=MAX_CONVERSATIONS, fail_fast=True)
    ]

    def chats(self, max_choices: int) -> list[ChatRequest]:
        """A chat request for each conversation; all together have at most `max_choices` choices.

        Raises:
            ApiError: 400, there are more, or a field is of single chats only.
        """
        refuse_if(bool(self.stream), "stream", "Batched chats cannot be streamed: set 'stream' to false.")
        transfer = self.kv_transfer_params
        refuse_if(
            transfer is not None and transfer.prompt_token_ids is not None,
            "kv_transfer_params.prompt_token_ids",
            "One prompt cannot stand for several conversations: leave out 'kv_transfer_params.prompt_token_ids'.",
        )
        choices = len(self.messages) * (self.n or 1)
        if choices > max_choices:
            raise bad_request(
                f"The request asks for {choices} choices; at most {max_choices} are taken in one request "
                "(--max-num-waiting).",
                "messages",
            )
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return [ChatRequest.model_construct(**{**fields, "messages": messages}) for messages in self.messages]


def batched_chat_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions/batch", responses=json_answers(ChatResponse))
    async def create_batched_chat_completion(body: BatchedChatRequest) -> Response:
        """Answer several conversations. With `n` choices each, the first n are of the first one, and so on."""
        chats = body.chats(service.llm.config.scheduler.max_num_waiting)
        prepared = [await prepare_chat(service, chat) async for chat in _in_turn(chats)]
        response_id = new_id("chatcmpl-")
        async with AsyncExitStack() as stack:
            generations = [
                await stack.enter_async_context(
                    await Generation.start(service, answer, f"{response_id}_{index}", **chat.queueing)
                )
                async for index, (chat, answer) in _in_turn(enumerate(zip(chats, prepared, strict=True)))
            ]
            answers = []
            async for chat, answer, generation in _in_turn(zip(chats, prepared, generations, strict=True)):
                outputs = await wait_finished(generation)
                writer = ChatWriter(service, chat, response_id, answer.answer_format)
                answers.append(
                    await asyncio.to_thread(writer.write_whole, outputs)
                    if writer.takes_long
                    else writer.write_whole(outputs)
                )
        return Response(
            await asyncio.to_thread(_join, answers), headers=body.ignored_headers, media_type="application/json"
        )

    return router


async def _in_turn(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a turn of the event loop between them: many must not keep other streams waiting."""
    for item in items:
        yield item
        await asyncio.sleep(0)


def _join(answers: Sequence[bytes]) -> bytes:
    """One answer with the choices of all, numbered anew, and the sum of their usages.

    What a single answer says of its prompt is left out.
    """
    first, *others = [msgspec.json.decode(answer) for answer in answers]
    for other in others:
        first["choices"] += other["choices"]
        first["usage"] = _added(first["usage"], other["usage"])
    for index, choice in enumerate(first["choices"]):
        choice["index"] = index
    if others:
        first = {name: value for name, value in first.items() if not name.startswith("prompt_")}
    return msgspec.json.encode(first)


def _added(left: Any, right: Any) -> Any:
    """The sum of two usages, member by member."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: _added(value, right.get(name)) for name, value in left.items()}
    return left if right is None else left + right
