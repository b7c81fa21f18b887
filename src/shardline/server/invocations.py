"""POST /invocations: one path for all bodies, as SageMaker calls it. What the body has says which endpoint answers."""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from shardline.server.errors import bad_request

_ENDPOINTS = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("documents", "/v1/rerank"),
    ("text_1", "/v1/score"),
    ("queries", "/v1/score"),
    ("input", "/v1/embeddings"),
)
"""Which endpoint takes a body that has a field; the first one counts."""


def endpoint_of(body: bytes) -> str | None:
    """The path of the endpoint that answers a body; None: there is none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return None
    return next((path for name, path in _ENDPOINTS if bytes(fields.get(name, b"null")) != b"null"), None)


class Invocations:
    """Passes requests on to other endpoints of `app`, as if their clients had named them."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has left
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        path = endpoint_of(body)
        if path is None:
            names = ", ".join(f"'{name}'" for name, _ in _ENDPOINTS)
            error = bad_request(f"Cannot find a handler for this request: its body must be JSON with one of {names}.")
            await error.response()(scope, receive, send)
            return
        unread = [True]

        async def receive_again() -> Message:
            if unread:
                unread.clear()
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        # The same scope, since the connection and the middleware look for what a stream leaves in it.
        scope["path"] = scope.get("root_path", "") + path
        await self._app.router(scope, receive_again, send)
