"""Errors in the shape of the endpoint that answers: OpenAI's, Anthropic's or Cohere's."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from shardline.server import errors
from shardline.server.anthropic import errors as anthropic
from shardline.server.cohere import errors as cohere
from shardline.server.sse import DONE_EVENT, make_event

_RENDER = "/render"
"""The endpoints that show prompts are vLLM's, so their errors have OpenAI's shape."""


def _is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or (path.startswith("/v1/messages/") and not path.endswith(_RENDER))


def _is_cohere(path: str) -> bool:
    return path == cohere.PATH or (path.startswith(cohere.PATH + "/") and not path.endswith(_RENDER))


def error_answer(error: errors.ApiError, path: str) -> Response:
    """The error as an HTTP answer. `path` is the endpoint's, without the prefix of --root-path."""
    if _is_anthropic(path):
        return anthropic.error_answer(error)
    return cohere.error_answer(error) if _is_cohere(path) else error.response()


def error_end(error: errors.ApiError, path: str, num_events: int = 0) -> bytes:
    """The end of a stream that has failed after so many events."""
    if _is_anthropic(path):
        return anthropic.error_event(error)
    if _is_cohere(path):
        return cohere.error_event(error) + DONE_EVENT
    if path == "/v1/responses":
        fields = {"code": error.code, "message": str(error.detail), "param": None, "sequence_number": num_events}
        return b"event: error\n" + make_event(msgspec.json.encode({"type": "error", **fields}))
    return make_event(error.body) + DONE_EVENT
