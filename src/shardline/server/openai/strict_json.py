"""The strict parsing of request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shardline.server.errors import bad_request
from shardline.server.openai.body_size import check_json_size
from shardline.server.openai.large_json import parse_json

_SMALL_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop, in a millisecond or so, whatever they are."""


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
        if len(body) <= _SMALL_BYTES:
            return _parse(body)
        await asyncio.to_thread(check_json_size, body)
        return await asyncio.to_thread(_parse, body)


def _parse(body: bytes) -> Any:
    try:
        return parse_json(body)
    except ValueError as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}.") from error


class StrictRoute(APIRoute):
    """A route whose JSON body must not contain NaN, infinity or half a surrogate pair."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the strict parser."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle
