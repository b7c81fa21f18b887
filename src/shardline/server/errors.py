"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the matching HTTP status."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_DRAINING_SECONDS = 5
RETRY_CONNECTIONS_SECONDS = 2


class ApiError(HTTPException):
    """An error that a client gets as its answer.

    Args:
        status: HTTP status.
        message: tells people what is wrong and what would work.
        type: OpenAI's error type.
        param: the field of the request that is wrong.
        code: a stable word that programs can test.
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.code = code
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.body = msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
        """The JSON of the answer."""

    def response(self) -> Response:
        """The error as an HTTP answer."""
        return Response(self.body, self.status_code, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request is wrong and will never succeed."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    """A 503: the server cannot run the request now, or has stopped for good."""
    return ApiError(503, message, type=SERVER_ERROR, code=code, retry_after=retry_after)


def too_many_connections() -> ApiError:
    """The answer on connections for which no descriptor is left."""
    message = "The server has too many connections; try again later."
    return unavailable(message, "too_many_connections", RETRY_CONNECTIONS_SECONDS)


def draining() -> ApiError:
    """The answer to new requests during shutdown."""
    return unavailable("The server is shutting down and takes no new requests.", "draining", RETRY_DRAINING_SECONDS)


def interrupted() -> ApiError:
    """The answer to requests that are still running when a shutdown must end them."""
    return unavailable(
        "The server is shutting down, and this answer was not finished in time.", "draining", RETRY_DRAINING_SECONDS
    )


def engine_dead(reason: str) -> ApiError:
    """The answer to requests after the engine's death."""
    return unavailable(f"The engine has stopped: {reason or 'its process has ended'}", "engine_dead")


def answer_failed(reason: str) -> ApiError:
    """A 500: the engine gave up on one answer, and goes on with all others."""
    return ApiError(500, f"The answer could not be completed: {reason}", type=SERVER_ERROR, code="answer_failed")


def internal_error() -> ApiError:
    """A 500. The log says what happened; the answer does not."""
    return ApiError(
        500, "The server had an error while processing your request.", type=SERVER_ERROR, code="internal_error"
    )


class ErrorBody(BaseModel):
    """An error, for /openapi.json."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The answer to a request that failed."""

    error: ErrorBody
