"""What happens to every request before and after all else: its id, the count of its answer, and the access log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.server.admission import OPEN_PATHS
from shardline.server.errors import internal_error
from shardline.server.event_stream import STREAM_ERROR

access_logger = logging.getLogger("shardline.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class AccessMiddleware:
    """Gives each request an id, counts its answer and logs method, path, status and time, but no body and no query.

    A stream that fails after its status was sent is logged with the error's code, or with "disconnected".

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
        complete = False
        disconnected = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
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
            await internal_error().response()(scope, receive, send_with_id)
        finally:
            ending = scope.get(STREAM_ERROR, "" if complete or not status else "disconnected")
            self._record(scope, status, time.perf_counter() - start, request_id, ending)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str, ending: str) -> None:
        """`ending`: why the answer is not whole, although it had begun; empty: it is."""
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
            line = (client, scope["method"], path, status, seconds, request_id, f" {ending}" if ending else "")
            access_logger.log(level, "%s %s %s %d %.3fs %s%s", *line)
