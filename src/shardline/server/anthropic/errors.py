"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from shardline.server.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    kind = _TYPES.get(error.status_code, "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": str(error.detail)}})


def error_answer(error: ApiError) -> Response:
    """The error as an HTTP answer."""
    return Response(error_body(error), error.status_code, error.headers, media_type="application/json")


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
