"""JSON bodies, parsed strictly. Those that would hold up other threads are parsed by `large_json`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, model_validator
from starlette.requests import Request
from starlette.responses import Response

from shardline.server import large_json
from shardline.server.errors import bad_request

MAX_TEMPLATE_VALUES = 65_536
"""Values in one field that chat templates write as JSON."""
MAX_FIELDS = 256
"""The most fields of one object. Every unknown field would become an error of its own."""


class RequestModel(BaseModel):
    """A request body, or an object in it. Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"an object has {len(value)} fields; at most {MAX_FIELDS} are taken")
        return value


class StrictRoute(APIRoute):
    """A route whose JSON body must not contain NaN, infinity or half a surrogate pair."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the strict parser."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            chunks: list[bytes] = []
            try:
                async for chunk in self.stream():
                    chunks.append(chunk)
                self._body = b"".join(chunks)
            finally:
                chunks.clear()  # the error of a client that leaves lives on, and this frame with it
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= large_json.SLICE_BYTES:  # it takes a millisecond or so, whatever it is
            return _parse(body)
        await asyncio.to_thread(large_json.check_size, body)
        return await asyncio.to_thread(_parse, body)


def _parse(body: bytes) -> Any:
    try:
        return parse_json(body)
    except ValueError as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}.") from error


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or contains NaN, infinity or half a surrogate pair.
    """
    # The standard library's parser accepts NaN and lone surrogates, which break tokenizers and answers.
    if len(body) > large_json.SLICE_BYTES:
        return large_json.parse_slices(body)
    return pydantic_core.from_json(body, allow_inf_nan=False)


def check_template_values(name: str, field: Any) -> None:
    """Refuse a field with too many values. Copying them and writing them as JSON holds up all other threads.

    Raises:
        ApiError: 400.
    """
    left = MAX_TEMPLATE_VALUES
    unread = [field]
    while unread:
        entry = unread.pop()
        values = entry.values() if isinstance(entry, dict) else entry
        left -= len(values)
        if left < 0:
            raise bad_request(f"'{name}' has more than {MAX_TEMPLATE_VALUES} values.", name)
        unread += [value for value in values if isinstance(value, dict | list)]
