"""Middleware: what happens to every request before its handler. Plain ASGI, so that streams are not buffered."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.server.errors import ApiError, internal_error
from shardline.server.in_flight import InFlight

access_logger = logging.getLogger("shardline.access")

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/version", "/metrics"})
"""Paths that need no key: probes and Prometheus read them."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class AccessMiddleware:
    """Gives each request an id, counts its answer and logs method, path, status and time, but no body and no query.

    The id is the client's X-Request-Id if it is a plain word, else a new one; the answer has it as a header.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None] | None, log: bool) -> None:
        self._app = app
        self._count = count
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        status = 0
        disconnected = False

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            try:
                await send(message)
            except (OSError, RuntimeError):  # event loops raise these for a closed connection
                nonlocal disconnected
                disconnected = True
                raise

        start = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The framework's own answer would bypass this class and close the connection.
            if disconnected:
                return
            access_logger.exception("request %s failed", request_id)
            if status:
                raise
            await internal_error().response()(scope, receive, send_with_id)
        finally:
            self._record(scope, status, time.perf_counter() - start, request_id)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        # 499 is nginx's status for a client that disconnected before the answer began.
        status = status or 499
        route = scope.get("route")
        handler = route.path if route is not None else "none"
        if self._count is not None:
            self._count(handler, scope["method"], status)
        if self._log:
            level = logging.DEBUG if handler in OPEN_PATHS else logging.INFO
            client = scope["client"][0] if scope.get("client") else "-"
            path = scope["path"].encode("unicode_escape").decode()
            access_logger.log(level, "%s %s %s %d %.3fs %s", client, scope["method"], path, status, seconds, request_id)


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


class InFlightMiddleware:
    """Adds requests that may take long (POST) to `in_flight`."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._in_flight.run(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)
