"""POST /v1/responses, the responses that the server keeps, and those that are made in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import TypeAdapter
from starlette.responses import Response, StreamingResponse

from shardline.server.documentation import json_answers
from shardline.server.errors import ApiError, bad_request
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_format import thinking_budget
from shardline.server.openai.answer_parts import check_top_logprobs
from shardline.server.openai.answer_to_chat import PreparedChat, prepare_answer
from shardline.server.openai.chat.messages import ChatMessage
from shardline.server.openai.generation import Generation
from shardline.server.openai.responses.background import BackgroundRun
from shardline.server.openai.responses.request import InputItem, ResponsesRequest, to_messages
from shardline.server.openai.responses.store import ResponseStore
from shardline.server.openai.responses.writer import RawMessage, ResponseObject, ResponseWriter
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.service import Service, new_id
from shardline.server.sse import STREAM_HEADERS, EventStream

_STORED_ITEMS = TypeAdapter(list[InputItem])
_INLINE_ITEMS, _INLINE_BYTES = 256, 64 * 1024
"""The longest conversation that is read on the event loop."""
_MAX_CUT = 8
"""The longest prompt whose beginning is cut off, in lengths of the model."""


class DeletedResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to DELETE."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to GET …/input_items."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def response_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)
    store = ResponseStore(service.config.response_store_limit)
    running: dict[str, BackgroundRun] = {}

    @router.post("/v1/responses", responses=json_answers(ResponseObject, streams=True))
    async def create_response(body: ResponsesRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events.

        With `background`, the response is made whether or not the client waits for it.
        """
        if body.previous_response_id in running:
            message = f"Previous response with id '{body.previous_response_id}' has not ended: wait until it has."
            raise bad_request(message, "previous_response_id")
        chat = await prepare_response(service, body, _earlier_turns(store, body.previous_response_id))
        response, headers = _begin_response(service, body, chat), body.ignored_headers
        own = [_stored_item(item) for item in _own_items(body)]

        def keep(ended: ResponseObject) -> bool:
            if not ended.store or store.find_answer(ended.id) is not None:  # the id may be a client's word
                return False
            items = msgspec.json.encode([*own, *ended.output])
            return store.add_response(ended.id, msgspec.json.encode(ended), items, ended.previous_response_id)

        def end_run(run: BackgroundRun) -> None:
            ended = running.pop(response.id).response
            items = msgspec.json.encode([*own, *ended.output])
            store.end_response(ended.id, msgspec.json.encode(ended), items, run.events)

        writer = ResponseWriter(
            response,
            chat.answer_format,
            None if body.background else keep,
            with_reasoning=body.include_reasoning is not False,
            namespaces=body.namespaces,
        )
        generation = await Generation.start(service, chat, response.id, **body.admission)
        if body.background:
            if not keep(response):
                await generation.aclose()
                raise bad_request("The input is larger than what the server keeps (--response-store-bytes).", "input")
            run = running[response.id] = BackgroundRun(writer, generation, streams=bool(body.stream), on_end=end_run)
            return _follow(run.follow(0), headers) if body.stream else _json(response, headers)
        if body.stream:
            events = generation.mark(writer.write_events(body.num_events_before))
            return EventStream(events, generation, headers, write_error=writer.write_error, done=b"")
        async with generation:
            [output] = await wait_finished(generation)
            return Response(writer.write_whole(output), headers=headers, media_type="application/json")

    @router.get("/v1/responses/{response_id}", responses=json_answers(ResponseObject, streams=True))
    async def read_response(response_id: str, stream: bool = False, starting_after: int | None = None) -> Response:
        """A response that the server keeps.

        With `stream`, the events of a response that was created with `background` and `stream`, from the one after
        number `starting_after` on.
        """
        run = running.get(response_id)
        answer = store.find_answer(response_id)
        if answer is None:
            raise _not_found(response_id)
        if not stream:
            return Response(answer, media_type="application/json") if run is None else _json(run.response)
        events = store.find_events(response_id)
        if not (events if run is None else run.streams):
            message = "Only responses that were created with 'background' and 'stream' can be streamed."
            raise bad_request(message, "stream")
        start = 0 if starting_after is None else max(0, starting_after + 1)
        return _follow(_replay(events[start:]) if run is None else run.follow(start))

    @router.get("/v1/responses/{response_id}/input_items", responses=json_answers(InputItems))
    async def read_input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The items that a response was made from, those of the turns that it continues included."""
        turns = store.find_items(response_id)
        if turns is None:
            raise _not_found(response_id)
        items = await asyncio.to_thread(_decode_items, turns)
        items = items[: len(items) - _num_output_items(store.find_answer(response_id) or b"{}")]
        if order == "desc":
            items.reverse()
        if after is not None:
            place = next((index for index, item in enumerate(items) if item.get("id") == after), len(items))
            items = items[place + 1 :]
        page = [_listed_item(item) for item in items[:limit]]
        ids = [item["id"] for item in page]
        listed = InputItems(
            data=page,
            first_id=ids[0] if ids else None,
            last_id=ids[-1] if ids else None,
            has_more=len(items) > limit,
        )
        return Response(msgspec.json.encode(listed), media_type="application/json")

    @router.post("/v1/responses/{response_id}/cancel", responses=json_answers(ResponseObject))
    async def cancel_response(response_id: str) -> Response:
        """End a response that is made in the background. One that has ended stays as it is."""
        answer = store.find_answer(response_id)
        if answer is None:
            raise _not_found(response_id)
        run = running.get(response_id)
        if run is not None:
            await run.cancel()
            return _json(run.response)
        if not msgspec.json.decode(answer, type=_Kept).background:
            raise bad_request("Cannot cancel a synchronous response.", "response_id")
        return Response(answer, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", responses=json_answers(DeletedResponse))
    async def delete_response(response_id: str) -> Response:
        """Forget a response; one that is made in the background ends."""
        if response_id in running:
            await running[response_id].cancel()
        if not store.delete_response(response_id):
            raise _not_found(response_id)
        return Response(msgspec.json.encode(DeletedResponse(id=response_id)), media_type="application/json")

    return router


class _Kept(msgspec.Struct):
    """What is read of a response that is kept."""

    background: bool = False
    output: list[msgspec.Raw] = []


def _json(response: ResponseObject, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(response), headers=headers, media_type="application/json")


def _follow(events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> Response:
    return StreamingResponse(events, headers={**STREAM_HEADERS, **(headers or {})}, media_type=EventStream.media_type)


async def _replay(events: Sequence[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(events)


async def prepare_response(service: Service, body: ResponsesRequest, earlier: Sequence[bytes] = ()) -> PreparedChat:
    """Check a request for a response, render its conversation, and prepare its answer.

    `earlier`: for each turn that it continues, the JSON of its items.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    service.require_model(body.model)
    body.check()
    if body.top_logprobs is not None:
        check_top_logprobs(service, body.top_logprobs)
    params = body.sampling_params(
        max_tokens=body.max_output_tokens,
        logprobs=body.num_logprobs,
        defaults=service.sampling_defaults,
    )
    messages = await _read_conversation(body.instructions, earlier, _own_items(body))
    length = service.llm.model.max_model_len
    chat = await body.conversation_fields.encode_messages(
        service,
        messages,
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=length * _MAX_CUT if body.truncation == "auto" else None,
        param="input",
    )
    token_ids = body.truncate_prompt(chat.token_ids)
    if body.truncation == "auto":
        token_ids = token_ids[-max(1, length - (body.max_output_tokens or 1)) :]
    return await prepare_answer(
        service,
        replace(chat, token_ids=token_ids),
        params,
        body.text_format,
        reasoning=service.chat.reasoning_parser,
        with_reasoning=body.include_reasoning is not False,
        max_reasoning_tokens=thinking_budget(
            body.thinking_token_budget, service.chat.reasoning_parser, service.require_tokenizer()
        ),
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


def _stored_item(item: InputItem) -> dict[str, Any]:
    """An item as it is kept: it has an id and a type."""
    kind = item.type or "message"
    prefix = {"message": "msg_", "reasoning": "rs_"}.get(kind, "fc_")
    return {"id": new_id(prefix), "type": kind, "status": "completed", **item.model_dump(exclude_none=True)}


def _listed_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item as clients read it: the content of a message has parts."""
    content = item.get("content")
    if item["type"] != "message" or not isinstance(content, str):
        return item
    if item["role"] == "assistant":
        return {**item, "content": [{"type": "output_text", "text": content, "annotations": []}]}
    return {**item, "content": [{"type": "input_text", "text": content}]}


def _decode_items(turns: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for turn in turns for item in msgspec.json.decode(turn)]


def _num_output_items(answer: bytes) -> int:
    return len(msgspec.json.decode(answer, type=_Kept).output)


def _begin_response(service: Service, body: ResponsesRequest, chat: PreparedChat) -> ResponseObject:
    """The response without its output."""
    shows = bool(body.enable_response_messages)
    wanted = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    response_id, created = body.origin(new_id("resp_"))
    return ResponseObject(
        id=response_id,
        created_at=created,
        model=service.name_of(body.model),
        system_fingerprint=service.llm.model.fingerprint,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
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
        truncation=body.truncation or "disabled",
        user=body.user,
        input_messages=[RawMessage(chat.answer_format.prompt, chat.token_ids)] if shows else msgspec.UNSET,
        output_messages=[] if shows else msgspec.UNSET,
    )


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", param="response_id", code="response_not_found")
