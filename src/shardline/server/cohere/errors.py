"""Errors in Cohere's shape: `{"message"}`, or a last event of the answer."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from shardline.server.errors import ApiError
from shardline.server.sse import make_event

PATH = "/cohere/v2/chat"


def error_answer(error: ApiError) -> Response:
    """The error as an HTTP answer."""
    body = msgspec.json.encode({"message": str(error.detail)})
    return Response(body, error.status_code, error.headers, media_type="application/json")


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that failed, but for the mark of the end."""
    delta = {"error": str(error.detail), "finish_reason": "ERROR"}
    return make_event(msgspec.json.encode({"type": "message-end", "delta": delta}))
