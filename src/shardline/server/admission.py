"""Which requests reach a handler: those with a valid key, and with a body that is not too large.

This is plain ASGI, so that streams are not buffered.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/version", "/metrics"})
"""Paths that need no key: probes and Prometheus read them."""


class SlashMiddleware:
    """Takes a slash after a path as if it were not there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] == "http" and scope["path"].endswith("/") and _route_path(scope) not in ("", "/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


class AuthMiddleware:
    """Refuses requests without a valid key as bearer token, except for the paths of OPEN_PATHS."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] == "http" and _route_path(scope) not in OPEN_PATHS:
            error = self._check(Headers(scope=scope).get("authorization", ""))
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, authorization: str) -> ApiError | None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return ApiError(
                401,
                "You didn't provide an API key. You need to provide your API key in an Authorization header using "
                "Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
            )
        digest = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        # Every key is compared in constant time, so that the time tells nothing about the keys.
        if not any([hmac.compare_digest(digest, valid) for valid in self._digests]):  # noqa: C419
            return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return None


def _route_path(scope: Scope) -> str:
    """The path as routes spell it, without the prefix of --root-path, which the HTTP library has added."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class BodyLimitMiddleware:
    """Refuses bodies of more than `limit` bytes: at once if the header gives the length, else while they arrive."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._limit:
            await self._too_large().response()(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The request body is larger than {self._limit} bytes; the server's --max-request-bytes sets this limit.",
            code="request_too_large",
        )
