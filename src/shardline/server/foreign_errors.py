"""Routes of other providers' APIs, whose errors have another shape than OpenAI's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response

from shardline.server.errors import ApiError, explain_validation
from shardline.server.json_body import StrictRoute


class ForeignRoute(StrictRoute, ABC):
    """A route that answers errors in its own shape."""

    @staticmethod
    @abstractmethod
    def answer_error(error: ApiError) -> Response:
        """The error as an HTTP answer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with its errors."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return self.answer_error(explain_validation(error.errors(), error.body))
            except ApiError as error:
                return self.answer_error(error)

        return handle
