"""Errors as OpenAI words them: `{"error": {"message", "type", "param", "code"}}` with the status to match."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(HTTPException):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: for people: what is wrong and what would work.
        type: OpenAI's error type.
        param: the field of the request that is at fault.
        code: a stable word that programs can test.
        retry_after: seconds after which trying again makes sense.
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
        headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.body = msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
        """The JSON of the answer."""

    def response(self) -> Response:
        """This error as a whole HTTP answer."""
        return Response(self.body, self.status_code, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request can never work as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    """A 503: not now, or not here any more."""
    return ApiError(503, message, type=SERVER_ERROR, code=code, retry_after=retry_after)


def internal_error() -> ApiError:
    """A 500; what happened is in the log, not in the answer."""
    return ApiError(
        500, "The server had an error while processing your request.", type=SERVER_ERROR, code="internal_error"
    )
