"""Answers in flight, and how they end early: their client disconnects, or the server has to stop."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.server.errors import ApiError
from shardline.server.event_stream import DONE_EVENT, STREAM_ERROR, make_event


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
            last = make_event(error.body) + DONE_EVENT
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
