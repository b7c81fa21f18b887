"""Streams of server-sent events: how they follow an answer, and what they say if it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardline.api.outputs import RequestOutput
from shardline.server.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

DONE_EVENT = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies such as nginx must not buffer the events."""
COMMENT_SECONDS = 5.0
"""Silence after which a stream gets a comment: proxies and clients end connections that say nothing for long."""

STREAM_ERROR = "shardline.stream_error"
"""Where a request's scope says why its stream failed after it had begun."""

CUT = "shardline.cut"
"""Where a request's scope has a function that cuts its connection, whatever it still holds."""

PROBE_CLIENT = "shardline.probe_client"
"""Where a request's scope has a function that writes something harmless to its stream."""

WRITE_NOW = "shardline.write_now"
"""Where a request's scope may have a function that writes a part of the body at once.

It returns whether it has; a connection that is closed or full takes nothing.
"""


class FollowedAnswer(Protocol):
    """An answer that grows; see `openai.generation.Generation`."""

    @property
    def finished(self) -> bool: ...
    def listen(self, on_update: Callable[[int, RequestOutput], None] | None) -> None: ...
    def observe(self, index: int, output: RequestOutput) -> None: ...
    def check(self) -> None: ...
    async def __aenter__(self) -> object: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


Update = tuple[int, RequestOutput]
"""The index of a prompt, and its output so far."""

Events = Generator[bytes, Update | None, None]
"""Writes a stream. It yields the first events, then for each update its events, and for None the last ones."""


def make_event(data: bytes) -> bytes:
    """One server-sent event with `data`, JSON without line breaks."""
    return b"data: " + data + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return make_event(error.body)


class _Follower:
    """Sends the events of one answer as it grows.

    Each update is written where the engine's message is handled, without waking a task. If the connection is full, a
    task waits for it, and updates that come meanwhile become one.
    """

    __slots__ = (
        "_busy", "_error", "_events", "_generation", "_is_silent", "_send", "_timer", "_unsent", "_waiting", "_woken",
        "_write_now",
    )  # fmt: skip

    def __init__(
        self, events: Events, generation: FollowedAnswer, send: Send, write_now: Callable[[bytes], bool]
    ) -> None:
        self._events = events
        self._generation = generation
        self._send = send
        self._write_now = write_now
        self._woken = asyncio.Event()
        self._busy = False
        """Whether the task was woken. Until it waits again, updates are kept for it."""
        self._unsent = b""
        """What the connection did not take."""
        self._waiting: dict[int, RequestOutput] = {}
        """Updates that came while the task was busy."""
        self._error: Exception | None = None
        self._is_silent = False
        """Whether there was no event since `_look` was last called."""
        self._timer = asyncio.get_running_loop().call_later(COMMENT_SECONDS, self._look)

    async def run(self) -> None:
        """Send all events.

        Raises:
            ApiError: the answer failed.
        """
        generation = self._generation
        try:
            await self._send_body(next(self._events))
            generation.listen(self._on_update)
            while self._error is None and (self._unsent or self._waiting or not generation.finished):
                await self._woken.wait()
                if self._error is None:
                    await self._send_unsent()
                    self._woken.clear()
                    self._busy = False
        finally:
            generation.listen(None)
            self._timer.cancel()
        if self._error is not None:
            raise self._error
        await self._send_body(self._events.send(None))

    def _on_update(self, index: int, output: RequestOutput) -> None:
        """An output has changed. This runs for every token of every stream."""
        if self._busy:
            self._waiting[index] = output
            return
        try:
            self._generation.observe(index, output)
            body = self._events.send((index, output))
        except Exception as error:
            self._error = error
            self._wake()
            return
        if body:
            self._is_silent = False
            if not self._write_now(body):
                self._unsent = body
                self._wake()
        if output.finished:
            self._wake()

    def probe_client(self) -> None:
        """Send a comment now: a client that has left will refuse it."""
        if not (self._busy or self._write_now(COMMENT)):
            self._unsent = COMMENT
            self._wake()

    def _look(self) -> None:
        """Send a comment if the stream has been silent for a while, and look again after as long."""
        if self._is_silent:
            self.probe_client()
        self._is_silent = True
        self._timer = asyncio.get_running_loop().call_later(COMMENT_SECONDS, self._look)

    def _wake(self) -> None:
        self._busy = True
        self._woken.set()

    async def _send_unsent(self) -> None:
        """Send what the connection did not take, and the updates that have come meanwhile."""
        while self._unsent or self._waiting:
            body, self._unsent = self._unsent, b""
            await self._send_body(body)
            waiting, self._waiting = self._waiting, {}
            for index, output in waiting.items():
                self._is_silent = False
                self._generation.observe(index, output)
                self._unsent += self._events.send((index, output))

    async def _send_body(self, body: bytes) -> None:
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


class EventStream(Response):
    """An answer that sends `events` as `generation` grows.

    An error in the middle becomes what `write_error` returns, since the status line has been sent. `done`: the last
    event of all. The generation is always left, even if no event was sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        generation: FollowedAnswer,
        headers: Mapping[str, str] | None = None,
        *,
        write_error: Callable[[ApiError], bytes] = _error_event,
        done: bytes = DONE_EVENT,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **(headers or {})})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events
        self._generation = generation
        self._write_error = write_error
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. If the client reads slowly, nothing piles up here.

        Raises:
            ApiError: the answer failed before it began.
        """
        last = self._done
        async with self._generation:
            self._generation.check()  # until the status line has been sent, a failure has a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            follower = _Follower(self._events, self._generation, send, scope.get(WRITE_NOW, _take_nothing))
            scope[PROBE_CLIENT] = follower.probe_client
            try:
                await follower.run()
            except ApiError as error:
                scope[STREAM_ERROR] = error.code or "error"
                last = self._write_error(error) + self._done
            except Exception:
                logger.exception("a stream failed")
                scope[STREAM_ERROR] = "internal_error"
                last = self._write_error(internal_error()) + self._done
            finally:
                del scope[PROBE_CLIENT]
                self._events.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _take_nothing(body: bytes) -> bool:
    return False
