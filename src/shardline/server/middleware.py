"""What every request passes before and behind its handler: the access log, keys, bounds of bodies, the load of the
engine, and an early end.

This is plain ASGI, so that streams are not buffered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.api.requests import request_owner
from shardline.messages.stats import EngineStats
from shardline.server.error_shapes import error_answer, error_end
from shardline.server.errors import ApiError, body_too_large, internal_error, too_many_large_bodies
from shardline.server.keys import ADMIN_PREFIXES, PAGE_PREFIX, ApiKeys, owner_of
from shardline.server.sse import STREAM_ERROR

if TYPE_CHECKING:
    from prometheus_client import Counter

MAX_LARGE_BODIES = 16
"""Bodies of the largest size that the server holds at a time, or more of smaller ones."""
access_logger = logging.getLogger("shardline.access")
INSIDE = "shardline.inside"
"""Where the scope of a request says that the server itself has made it: it needs no key, and no line in the log."""
REQUEST_ID = "shardline.request_id"
"""Where a request's scope has its id."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
IGNORED_HEADER = "X-Shardline-Ignored"
"""Where an answer names the fields of its request that had no effect."""
LOAD_REPORT_HEADER = "endpoint-load-metrics-format"
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/version", "/metrics"})
"""Paths that need no key: probes and Prometheus read them."""


def route_path(scope: Scope) -> str:
    """The path as routes spell it, without the prefix of --root-path, which the HTTP library has added."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class AccessMiddleware:
    """Gives each request an id, counts its answer and logs method, path, status and time, but no body and no query.

    A stream that fails after its status was sent is logged with the error's code, or with "disconnected".

    The id is the client's X-Request-Id if it is a plain word, else a new one. The answer has it as a header if the
    request had one, or with `names_all`.
    """

    def __init__(self, app: ASGIApp, answers: Counter | None, log: bool, names_all: bool = False) -> None:
        """`answers`: counts them by handler, method and status."""
        self._app = app
        self._answers = answers
        self._log = log
        self._names_all = names_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        names = self._names_all or bool(request_id)
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = os.urandom(16).hex()
        scope[REQUEST_ID] = request_id
        status = 0
        complete = False
        disconnected = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                if names or status >= 500:  # the log says more of these
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
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
            await error_answer(internal_error(), route_path(scope))(scope, receive, send_with_id)
        finally:
            ending = scope.get(STREAM_ERROR, "" if complete or not status else "disconnected")
            self._record(scope, status, time.perf_counter() - start, request_id, ending)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str, ending: str) -> None:
        """`ending`: why the answer is not whole, although it had begun; empty: it is."""
        # 499 is nginx's status for a client that disconnected before the answer began.
        status = status or 499
        route = scope.get("route")
        handler = route.path if route is not None else "none"
        if self._answers is not None:  # by the route, not the path: the number of paths has no limit
            self._answers.labels(handler, scope["method"], str(status)).inc()
        if self._log:
            level = logging.DEBUG if handler in OPEN_PATHS or INSIDE in scope else logging.INFO
            client = scope["client"][0] if scope.get("client") else "-"
            path = scope["path"].encode("unicode_escape").decode()
            line = (client, scope["method"], path, status, seconds, request_id, f" {ending}" if ending else "")
            access_logger.log(level, "%s %s %s %d %.3fs %s%s", *line)


class AuthMiddleware:
    """Notes whose requests are, and refuses those without a valid key as bearer token, except for the paths of
    OPEN_PATHS. A router may have checked keys that this server does not need.

    Paths that begin with one of ADMIN_PREFIXES need the key for administration, if there is one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, has_page: bool = False) -> None:
        """`has_page`: / and its files are those of the page, which is the same everywhere, and asks for the key."""
        self._app = app
        self._keys = keys
        self._has_page = has_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] == "http" and INSIDE not in scope:
            headers = Headers(scope=scope)
            key = headers.get("authorization", "")
            if not key and "x-api-key" in headers:  # as clients of Anthropic send it
                key = f"Bearer {headers['x-api-key']}"
            request_owner.set(owner_of(key) if key else "")
            error = self._check(route_path(scope), key)
            if error is not None:
                await error_answer(error, route_path(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, authorization: str) -> ApiError | None:
        admin = self._keys.has_admin and path.startswith(ADMIN_PREFIXES)
        is_page = self._has_page and (path == "/" or path.startswith(PAGE_PREFIX))
        if path in OPEN_PATHS or is_page or not (admin or self._keys.are_required):
            return None
        return self._keys.check(authorization, admin=admin)


class SlashMiddleware:
    """Takes a slash after a path as if it were not there, and so the prefix of --root-path, if a proxy has left it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        root = scope.get("root_path", "")
        if root and route_path(scope).startswith(root + "/"):
            scope["path"] = route_path(scope)
        if scope["type"] == "http" and scope["path"].endswith("/") and route_path(scope) not in ("", "/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies of more than `limit` bytes: at once if the header gives the length, else while they arrive.

    All bodies of requests that are not answered yet may have MAX_LARGE_BODIES times as much together. The endpoints of
    `unlimited` paths hold no body in memory, and have bounds of their own.
    """

    def __init__(self, app: ASGIApp, limit: int, unlimited: Collection[str] = ()) -> None:
        self._app = app
        self._limit = limit
        self._unlimited = unlimited
        self._num_held = 0
        """Bytes of all bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http" or route_path(scope) in self._unlimited:
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._limit:
            await error_answer(body_too_large(self._limit), route_path(scope))(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self._num_held += size
            if received > self._limit:
                raise body_too_large(self._limit)
            if size and self._num_held > MAX_LARGE_BODIES * self._limit:
                raise too_many_large_bodies()
            return message

        try:
            await self._app(scope, receive_limited, send)
        finally:
            self._num_held -= received


class LoadReportMiddleware:
    """Adds the load of the engine, for balancers that ask for ORCA's report, to answers whose request has
    LOAD_REPORT_HEADER."""

    def __init__(self, app: ASGIApp, stats: Callable[[], Sequence[EngineStats]]) -> None:
        self._app = app
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        asked = Headers(scope=scope).get(LOAD_REPORT_HEADER) if scope["type"] == "http" else None
        if not asked:
            await self._app(scope, receive, send)
            return

        async def send_with_report(message: Message) -> None:
            if message["type"] == "http.response.start" and (report := _load_report(asked, self._stats())) is not None:
                message["headers"] = [*message.get("headers", ()), (b"endpoint-load-metrics", report.encode())]
            await send(message)

        await self._app(scope, receive, send_with_report)


def _load_report(report_format: str, stats: Sequence[EngineStats]) -> str | None:
    """The value of the header `endpoint-load-metrics`; None: the format is neither TEXT nor JSON."""
    total = sum(one.kv_blocks_total for one in stats)
    named = {
        "kv_cache_usage_perc": sum(one.kv_blocks_used for one in stats) / total if total else 0.0,
        "num_requests_waiting": float(sum(one.num_waiting for one in stats)),
    }
    if report_format.lower() == "text":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
    if report_format.lower() == "json":
        return "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
    return None


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


class InFlight:
    """All exchanges of a server that have not ended."""

    def __init__(self) -> None:
        self._exchanges: set[Exchange] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._exchanges)

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with `app`; it is in flight until then."""
        exchange = Exchange(receive, send)
        self._exchanges.add(exchange)
        self._empty.clear()
        try:
            await exchange.run(app, scope)
        finally:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._empty.set()

    async def wait_empty(self, timeout: float) -> bool:
        """Wait until nothing is in flight. False: something still was after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        return not self._exchanges

    def interrupt(self, error: ApiError) -> int:
        """Stop everything in flight with `error`; returns the number of stopped requests."""
        for exchange in self._exchanges:
            exchange.interrupt(error)
        return len(self._exchanges)


class Exchange:
    """One request and its answer. It wraps the two ASGI callables and runs the application in a task of its own.

    The task is cancelled if the client disconnects, and by `interrupt`. The cancelled code closes its output stream,
    and that frees the request's KV blocks.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._body_read = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._error: ApiError | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = False
        self._streaming = False
        self._ended = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Answer the request with `app`."""
        self._task = asyncio.ensure_future(app(scope, self.receive, self.send))
        watcher = asyncio.create_task(self._cancel_on_disconnect(self._task))
        try:
            await self._task
        except asyncio.CancelledError:
            if self._disconnected.is_set():
                return
            if self._error is None:
                raise
            if self._started:
                scope[STREAM_ERROR] = self._error.code or "error"
            await self._send_error(self._error, scope)
        finally:
            watcher.cancel()

    def interrupt(self, error: ApiError) -> None:
        """Stop the application; the client gets `error` as its answer or as the last event of its stream."""
        if self._task is not None and not self._ended and self._error is None:
            self._error = error
            self._task.cancel()

    async def receive(self) -> Message:
        """The next part of the body; after the last part, wait for the client to disconnect."""
        if self._body_read.is_set():
            await self._disconnected.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._body_read.set()
        if message["type"] == "http.disconnect":
            self._disconnected.set()
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer, and remember whether the answer has started and ended."""
        if message["type"] == "http.response.start":
            self._started = True
            self._streaming = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    async def _cancel_on_disconnect(self, task: asyncio.Task[None]) -> None:
        await self._body_read.wait()
        while not self._disconnected.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._disconnected.set()
        if not self._ended:
            task.cancel()

    async def _send_error(self, error: ApiError, scope: Scope) -> None:
        if not self._started:
            await error_answer(error, route_path(scope))({"type": "http"}, self.receive, self._send)
        elif self._streaming and not self._ended:
            last = error_end(error, route_path(scope))
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
