"""Which requests reach a handler: those with a valid key, and with a body that is not too large.

This is plain ASGI, so that streams are not buffered.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.server.errors import ApiError
from shardline.server.keys import ApiKeys

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/version", "/metrics"})
"""Paths that need no key: probes and Prometheus read them."""

ADMIN_PREFIXES = ("/requests",)
"""Paths of administration."""


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
    """Refuses requests without a valid key as bearer token, except for the paths of OPEN_PATHS.

    Paths that begin with one of ADMIN_PREFIXES need the key for administration, if there is one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] == "http":
            error = self._check(_route_path(scope), Headers(scope=scope).get("authorization", ""))
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, authorization: str) -> ApiError | None:
        admin = self._keys.has_admin and path.startswith(ADMIN_PREFIXES)
        if path in OPEN_PATHS or not (admin or self._keys.are_required):
            return None
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return ApiError(
                401,
                "You didn't provide an API key. You need to provide your API key in an Authorization header using "
                "Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
            )
        if not self._keys.is_valid(key.strip(), admin=admin):
            return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return None


def _route_path(scope: Scope) -> str:
    """The path as routes spell it, without the prefix of --root-path, which the HTTP library has added."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


MOST_LARGE_BODIES = 16
"""Bodies of the largest size that the server holds at a time, or more of smaller ones."""


class BodyLimitMiddleware:
    """Refuses bodies of more than `limit` bytes: at once if the header gives the length, else while they arrive.

    All bodies of requests that are not answered yet may have MOST_LARGE_BODIES times as much together.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._num_held = 0
        """Bytes of all bodies."""

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
            size = len(message.get("body", b""))
            received += size
            self._num_held += size
            if received > self._limit:
                raise self._too_large()
            if size and self._num_held > MOST_LARGE_BODIES * self._limit:
                raise ApiError(
                    429,
                    "The server holds too many large requests; try again later.",
                    type="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after=2,
                )
            return message

        try:
            await self._app(scope, receive_limited, send)
        finally:
            self._num_held -= received

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The request body is larger than {self._limit} bytes; the server's --max-request-bytes sets this limit.",
            code="request_too_large",
        )
