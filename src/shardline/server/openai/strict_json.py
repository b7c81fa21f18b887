"""The strict parsing of request bodies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shardline.server.errors import bad_request
from shardline.server.openai.body_size import check_json_size


class _StrictRequest(Request):
    async def json(self) -> Any:
        # The standard library's parser accepts NaN and lone surrogates, which break tokenizers and answers.
        body = await self.body()
        await check_json_size(body)
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
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
