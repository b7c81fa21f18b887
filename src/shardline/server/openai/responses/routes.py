"""POST /v1/responses, and GET and DELETE of the responses that the server keeps."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.responses import Response

from shardline.server.answer_schema import json_answers
from shardline.server.errors import ApiError
from shardline.server.json_body import StrictRoute
from shardline.server.openai.chat.prepare import PreparedChat, prepare_answer
from shardline.server.openai.chat.request import ChatMessage
from shardline.server.openai.responses.request import InputItem, ResponsesRequest, to_messages
from shardline.server.openai.responses.writer import OutputItem, ResponseObject, ResponseWriter
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream


@dataclass(eq=False)
class _Turn:
    """One turn of a conversation. Continuations share the turns before them."""

    items: bytes
    parent: _Turn | None
    num_users: int = 1
    """The stored response, if it is still there, and the turns that continue this one."""


@dataclass(frozen=True)
class _Entry:
    answer: bytes
    turn: _Turn


class ResponseStore:
    """Keeps responses in memory; when they have more than `limit` bytes, the least recently used ones go.

    A response that others continue may go or be deleted: its turn remains until the last of them is gone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all answers and of all turns that are reachable."""

    def __len__(self) -> int:
        return len(self._entries)

    def add_response(self, response_id: str, answer: bytes, items: bytes, previous_id: str | None) -> None:
        """Keep `answer`, the response as JSON, and `items`, the JSON of the turn's input and output items.

        If the response `previous_id` is gone meanwhile, or the answer is larger than the store, nothing is kept.
        """
        previous = None if previous_id is None else self._entries.get(previous_id)
        if (previous_id is not None and previous is None) or len(answer) + len(items) > self._limit:
            return
        turn = _Turn(items, None if previous is None else previous.turn)
        if turn.parent is not None:
            turn.parent.num_users += 1
        self._entries[response_id] = _Entry(answer, turn)
        self.num_bytes += len(answer) + len(items)
        while self.num_bytes > self._limit:
            self.delete_response(next(iter(self._entries)))

    def find_answer(self, response_id: str) -> bytes | None:
        """The JSON of a response; None: there is none of this id."""
        entry = self._touch(response_id)
        return None if entry is None else entry.answer

    def find_items(self, response_id: str) -> list[bytes] | None:
        """For each turn up to this response, oldest first, the JSON of its items; None: there is no such response."""
        entry = self._touch(response_id)
        if entry is None:
            return None
        turns = []
        turn: _Turn | None = entry.turn
        while turn is not None:
            turns.append(turn.items)
            turn = turn.parent
        return turns[::-1]

    def delete_response(self, response_id: str) -> bool:
        """Forget a response; returns whether there was one of this id."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= len(entry.answer)
        turn: _Turn | None = entry.turn
        while turn is not None:
            turn.num_users -= 1
            if turn.num_users > 0:
                break
            self.num_bytes -= len(turn.items)
            turn = turn.parent
        return True

    def _touch(self, response_id: str) -> _Entry | None:
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry


_STORED_ITEMS = TypeAdapter(list[InputItem])
_INLINE_ITEMS, _INLINE_BYTES = 256, 64 * 1024
"""The longest conversation that is read on the event loop."""


class DeletedResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to DELETE."""

    id: str
    object: str = "response"
    deleted: bool = True


def response_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)
    store = ResponseStore(service.config.response_store_limit)

    @router.post("/v1/responses", responses=json_answers(ResponseObject, streams=True))
    async def create_response(body: ResponsesRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events."""
        chat = await prepare_response(service, body, _earlier_turns(store, body.previous_response_id))
        response = _begin_response(service, body)

        def keep(ended: ResponseObject) -> None:
            if ended.store:
                items = _encode_turn(_own_items(body), ended.output)
                store.add_response(ended.id, msgspec.json.encode(ended), items, ended.previous_response_id)

        writer = ResponseWriter(response, chat.answer_format, keep)
        generation = await chat.start(service, response.id, **body.queueing)
        if body.stream:
            events, headers = writer.write_events(), body.ignored_headers
            return EventStream(events, generation, headers, write_error=writer.write_error, done=b"")
        async with generation:
            [output] = await generation.wait_finished()
            return Response(writer.write_whole(output), headers=body.ignored_headers, media_type="application/json")

    @router.get("/v1/responses/{response_id}", responses=json_answers(ResponseObject))
    async def read_response(response_id: str) -> Response:
        """A response that the server keeps."""
        answer = store.find_answer(response_id)
        if answer is None:
            raise _not_found(response_id)
        return Response(answer, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", responses=json_answers(DeletedResponse))
    async def delete_response(response_id: str) -> Response:
        """Forget a response."""
        if not store.delete_response(response_id):
            raise _not_found(response_id)
        return Response(msgspec.json.encode(DeletedResponse(id=response_id)), media_type="application/json")

    return router


async def prepare_response(service: Service, body: ResponsesRequest, earlier: Sequence[bytes] = ()) -> PreparedChat:
    """Check a request for a response, render its conversation, and prepare its answer.

    `earlier`: for each turn that it continues, the JSON of its items.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    service.require_model(body.model)
    body.check()
    params = body.sampling_params(
        max_tokens=body.max_output_tokens,
        logprobs=body.num_logprobs,
        defaults=service.llm.model.sampling_defaults,
    )
    messages = await _read_conversation(body.instructions, earlier, _own_items(body))
    chat = await body.conversation_fields.encode_messages(
        service, messages, add_special_tokens=bool(body.add_special_tokens), param="input"
    )
    return await prepare_answer(
        service,
        replace(chat, token_ids=body.truncate_prompt(chat.token_ids)),
        params,
        body.text_format,
        reasoning=service.chat.reasoning_parser,
        requested_form=body.requested_form,
        param="input",
        format_param="text.format",
    )


def _own_items(body: ResponsesRequest) -> list[InputItem]:
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    return list(body.input)


def _earlier_turns(store: ResponseStore, previous_id: str | None) -> list[bytes]:
    """For each turn that this request continues, the JSON of its items."""
    if previous_id is None:
        return []
    turns = store.find_items(previous_id)
    if turns is None:
        raise ApiError(
            404,
            f"Previous response with id '{previous_id}' not found. The server keeps responses in memory while there is "
            "room (--response-store-bytes): send the whole conversation as 'input'.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return turns


async def _read_conversation(
    instructions: str | None, earlier: Sequence[bytes], own: list[InputItem]
) -> list[ChatMessage]:
    """The messages of all turns. A long conversation is read on a thread."""

    def read() -> list[ChatMessage]:
        return to_messages(instructions, [*map(_STORED_ITEMS.validate_json, earlier), own])

    is_short = len(own) <= _INLINE_ITEMS and sum(map(len, earlier)) <= _INLINE_BYTES
    return read() if is_short else await asyncio.to_thread(read)


def _encode_turn(own: list[InputItem], output: list[OutputItem]) -> bytes:
    items = [item.model_dump(exclude_none=True) for item in own]
    return msgspec.json.encode([*items, *output])


def _begin_response(service: Service, body: ResponsesRequest) -> ResponseObject:
    """The response without its output."""
    wanted = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    return ResponseObject(
        id=new_id("resp_"),
        created_at=int(time.time()),
        model=service.model_names[0],
        system_fingerprint=service.llm.model.fingerprint,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": {"type": "text"}, **wanted},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", param="response_id", code="response_not_found")
