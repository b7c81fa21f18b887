"""The requests that are being answered: who leaves is noticed, who must stop is told why."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.server.errors import ApiError
from shardline.server.sse import DONE, event


class Exchange:
    """One request and its answer: wraps the two ASGI callables and runs the application in a task of its own.

    The task is cancelled when the client disconnects, and by `interrupt`; cancelled code closes its output stream,
    which gives the request's blocks back.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._body_read = asyncio.Event()
        self._left = asyncio.Event()
        self._error: ApiError | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = False
        self._streaming = False
        self._ended = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Answer the request with `app`."""
        self._task = asyncio.create_task(_run(app, scope, self.receive, self.send))
        watcher = asyncio.create_task(self._watch(self._task))
        try:
            await self._task
        except asyncio.CancelledError:
            if self._left.is_set():
                return
            if self._error is None:
                raise
            await self._send_error(self._error)
        finally:
            watcher.cancel()

    def interrupt(self, error: ApiError) -> None:
        """Stop the application; the client gets `error`, as an answer or as the last event of its stream."""
        if self._task is not None and not self._ended and self._error is None:
            self._error = error
            self._task.cancel()

    async def receive(self) -> Message:
        """The next part of the body; after it, `http.disconnect` once the client has left."""
        if self._body_read.is_set():
            await self._left.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._body_read.set()
        if message["type"] == "http.disconnect":
            self._left.set()
        return message

    async def send(self, message: Message) -> None:
        """Pass a part of the answer on, and keep track of how far it has got."""
        if message["type"] == "http.response.start":
            self._started = True
            self._streaming = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    async def _watch(self, task: asyncio.Task[None]) -> None:
        await self._body_read.wait()
        while not self._left.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left.set()
        if not self._ended:
            task.cancel()

    async def _send_error(self, error: ApiError) -> None:
        if not self._started:
            await error.response()({"type": "http"}, self.receive, self._send)
        elif self._streaming and not self._ended:
            await self._send({"type": "http.response.body", "body": event(error.body) + DONE, "more_body": False})


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


class InFlight:
    """All exchanges of a server."""

    def __init__(self) -> None:
        self._exchanges: set[Exchange] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._exchanges)

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with `app`, as one of those in flight."""
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
        """Wait until nothing is in flight; False: `timeout` seconds have passed first."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout)
        return not self._exchanges

    def interrupt(self, error: ApiError) -> int:
        """Stop everything in flight with `error`; returns how many requests that were."""
        for exchange in self._exchanges:
            exchange.interrupt(error)
        return len(self._exchanges)
