"""The answers of an endpoint, for /openapi.json."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel

from shardline.server.errors import ErrorResponse

Responses = dict[int | str, dict[str, Any]]
"""What FastAPI takes as the `responses` of an endpoint."""

_ERRORS = (
    (400, "The request is invalid."),
    (401, "The key is missing or wrong."),
    (404, "The model, or what was asked for, is not here."),
    (413, "The body is too large."),
    (429, "Too many requests are waiting."),
    (503, "The server is starting or shutting down, or its engine has stopped."),
    ("4XX", "The request is refused."),
    ("5XX", "The server failed."),
)


def json_answers(body: Any, *, streams: bool = False, error: type[BaseModel] = ErrorResponse) -> Responses:
    """The answers of an endpoint that sends `body`, a type that msgspec encodes, or an error.

    `streams`: the endpoint can also send server-sent events. `error`: the shape of its errors.
    """
    content = {"application/json": {"schema": _schema(body)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    # The middleware answers these before the endpoint is known.
    errors: Responses = {
        status: {"model": ErrorResponse if status in (401, 413) else error, "description": text}
        for status, text in _ERRORS
    }
    return {200: {"description": "The answer.", "content": content}, **errors}


@cache
def _schema(body: Any) -> dict[str, Any]:
    """The JSON schema of a type. It refers to nothing outside itself."""
    [schema], definitions = msgspec.json.schema_components([body])
    inlined: dict[str, Any] = _inline(schema, definitions)
    return inlined


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with each reference replaced by what it refers to."""
    if isinstance(schema, list):
        return [_inline(entry, definitions) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items() if key != "discriminator"}
