"""Answers in flight: how they are streamed, and how they end early.

A stream is sent as server-sent events. An answer ends early if its client disconnects or the server has to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.server.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

_DONE_EVENT = b"data: [DONE]\n\n"
_COMMENT = b": still working\n\n"
_COMMENT_SECONDS = 5.0
"""Silence after which a stream gets a comment: proxies and clients end connections that say nothing for long."""

STREAM_ERROR = "shardline.stream_error"
"""Where a request's scope says why its stream failed after it had begun."""

PROBE_CLIENT = "shardline.probe_client"
"""Where a request's scope has a function that writes something harmless to its stream."""


def make_event(data: bytes) -> bytes:
    """One server-sent event with `data`, JSON without line breaks."""
    return b"data: " + data + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return make_event(error.body)


class _Comments:
    """Sends a comment when a stream has been silent for a while. A token costs it no more than an addition."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._num_items = self._num_seen = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_COMMENT_SECONDS, self._look)
        self._sending: asyncio.Task[None] | None = None

    def probe_client(self) -> None:
        """Send a comment now: a client that has left will refuse it."""
        if self._sending is None or self._sending.done():
            self._sending = self._loop.create_task(self._send_comment())

    def note_item(self) -> None:
        """The stream is about to send something."""
        self._num_items += 1

    async def stop(self) -> None:
        """Send no more comments."""
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()  # a client that does not read would hold it for ever
            await asyncio.gather(self._sending, return_exceptions=True)

    def _look(self) -> None:
        if self._num_items == self._num_seen:
            self.probe_client()
        self._num_seen = self._num_items
        self._timer = self._loop.call_later(_COMMENT_SECONDS, self._look)

    async def _send_comment(self) -> None:
        await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


class EventStream(Response):
    """An answer that sends the items of `events`, each one or several whole events.

    An error in the middle becomes what `write_error` returns, since the status line has been sent. `done`: the last
    event of all. `source` is the context manager
    that the events are made from; it is always left, even if no event was requested.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AbstractAsyncContextManager[Any],
        headers: Mapping[str, str] | None = None,
        *,
        write_error: Callable[[ApiError], bytes] = _error_event,
        done: bytes = _DONE_EVENT,
    ) -> None:
        # Proxies such as nginx must not buffer the events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events
        self._source = source
        self._write_error = write_error
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. If the client reads slowly, `send` waits, so that nothing piles up here."""
        last = self._done
        async with self._source, aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            comments = _Comments(send)
            scope[PROBE_CLIENT] = comments.probe_client
            try:
                async for item in events:
                    comments.note_item()
                    await send({"type": "http.response.body", "body": item, "more_body": True})
            except ApiError as error:
                scope[STREAM_ERROR] = error.code or "error"
                last = self._write_error(error) + self._done
            except Exception:
                logger.exception("a stream failed")
                scope[STREAM_ERROR] = "internal_error"
                last = self._write_error(internal_error()) + self._done
            finally:
                del scope[PROBE_CLIENT]
                await comments.stop()
        await send({"type": "http.response.body", "body": last, "more_body": False})


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
        self._task = asyncio.create_task(_call_app(app, scope, self.receive, self.send))
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
            await self._send_error(self._error)
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

    async def _send_error(self, error: ApiError) -> None:
        if not self._started:
            await error.response()({"type": "http"}, self.receive, self._send)
        elif self._streaming and not self._ended:
            last = make_event(error.body) + _DONE_EVENT
            await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def _call_app(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


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
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout)
        return not self._exchanges

    def interrupt(self, error: ApiError) -> int:
        """Stop everything in flight with `error`; returns the number of stopped requests."""
        for exchange in self._exchanges:
            exchange.interrupt(error)
        return len(self._exchanges)


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
