"""What the server says of its endpoints: the answers in /openapi.json, and GET /docs, one page without scripts, which
loads nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from shardline.server.errors import ErrorResponse

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "summary{cursor:pointer}code,pre{font-family:ui-monospace,monospace}pre{overflow:auto;background:#8881;padding:1rem}"
    "b{display:inline-block;min-width:4.5rem}table{border-spacing:1rem .2rem}td{vertical-align:top}"
    ":root{color-scheme:light dark}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
"""Of every page, beside its policy."""
_HEADERS = {**PAGE_HEADERS, "Content-Security-Policy": _POLICY}
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

    `streams`: the endpoint can also send server-sent events. `error`: the form of its errors.
    """
    content = {"application/json": {"schema": _schema(body)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    # As schemas: of a model, the framework would make a validator for each status of each endpoint at every start.
    answers: Responses = {200: {"description": "The answer.", "content": content}}
    for status, text in _ERRORS:
        # The middleware answers these two before the endpoint is known.
        schema = _schema(ErrorResponse if status in (401, 413) else error)
        answers[status] = {"description": text, "content": {"application/json": {"schema": schema}}}
    return answers


@cache
def _schema(body: Any) -> dict[str, Any]:
    """The JSON schema of a type. It refers to nothing outside itself."""
    if isinstance(body, type) and issubclass(body, BaseModel):
        model: dict[str, Any] = body.model_json_schema()
        return {key: _inline(value, model.get("$defs", {})) for key, value in model.items() if key != "$defs"}
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


def documentation_routes(app: FastAPI) -> APIRouter:
    """The endpoint. The page is made once, of /openapi.json."""
    router = APIRouter()
    pages: dict[str, bytes] = {}

    @router.get("/docs", include_in_schema=False)
    async def show_documentation(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        if root not in pages:
            text = await asyncio.to_thread(lambda: write_page(app.openapi(), root))
            pages.clear()
            pages[root] = text.encode()
        return Response(
            pages[root],
            headers=_HEADERS,
            media_type="text/html; charset=utf-8",
        )

    return router


def write_page(schema: Mapping[str, Any], root: str = "") -> str:
    """A page about the endpoints of an OpenAPI schema; `root` begins their paths."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="{escape(root)}/openapi.json">openapi.json</a></p>'
        + "".join(
            _endpoint(method, root + path, operation, schema)
            for path, operations in schema["paths"].items()
            for method, operation in operations.items()
        )
        + "</html>"
    )


def _endpoint(method: str, path: str, operation: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    about = escape(operation.get("description", operation.get("summary", "")))
    bodies = operation.get("requestBody", {}).get("content", {}).values()
    rows = "".join(row for body in bodies for row in _fields(body.get("schema", {}), schema))
    rows += "".join(
        _field(one["name"], one.get("schema", {}), one.get("required")) for one in operation.get("parameters", ())
    )
    answers = "".join(
        f"<tr><td>{escape(str(status))}<td>{escape(answer.get('description', ''))}"
        for status, answer in operation.get("responses", {}).items()
    )
    takes = f"<h3>Takes</h3><table>{rows}</table>" if rows else ""
    return (
        f"<details><summary><b>{escape(method.upper())}</b><code>{escape(path)}</code></summary>"
        f"<p>{about}</p>{takes}<h3>Answers</h3><table>{answers}</table></details>"
    )


def _fields(body: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    """A row for each field of a body."""
    if "$ref" in body:
        body = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    required = body.get("required", ())
    for name, field in body.get("properties", {}).items():
        yield _field(name, field, name in required)


def _field(name: str, field: Mapping[str, Any], required: Any) -> str:
    mark = " (required)" if required else ""
    return f"<tr><td><code>{escape(name)}</code>{mark}<td><code>{escape(_kind(field))}</code>"


def _kind(field: Mapping[str, Any]) -> str:
    """The type of a field in words."""
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(map(_kind, field["anyOf"])))
    if "enum" in field or "const" in field:
        return " | ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"array of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))
