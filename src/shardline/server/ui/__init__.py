"""GET /: the page, whose scripts and styles are files of this folder. It loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shardline.server.documentation import PAGE_HEADERS
from shardline.server.errors import ApiError
from shardline.server.keys import PAGE_PREFIX

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Trusted types: the browser itself refuses to turn text into markup."""
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_routes() -> APIRouter:
    """The page and its files, which are read once."""
    router = APIRouter()
    answers = {}
    for file in files(__package__).iterdir():
        name, dot, suffix = file.name.rpartition(".")
        if kind := _KINDS.get(dot + suffix):
            body = file.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            answers[f"{name}.{suffix}"] = body, f"{kind}; charset=utf-8", tag

    def answer(name: str, request: Request) -> Response:
        if name not in answers:
            raise ApiError(404, f"Invalid URL ({request.method} {request.scope['path']})", code="unknown_url")
        body, kind, tag = answers[name]
        # Browsers ask each time, so that a new version of the server is seen at once.
        headers = {**PAGE_HEADERS, "Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    @router.get("/", include_in_schema=False)
    async def show_page(request: Request) -> Response:
        return answer("index.html", request)

    @router.get(PAGE_PREFIX + "{name}", include_in_schema=False)
    async def show_file(name: str, request: Request) -> Response:
        return answer(name, request)

    return router
