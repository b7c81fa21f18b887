"""Runs the requests of batches through the server's own endpoints, without a network between."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Scope

from shardline.server.errors import ApiError, internal_error
from shardline.server.middleware import INSIDE
from shardline.server.openai.batch.lines import Answer, Line, NoRequest, parse_request

if TYPE_CHECKING:
    from shardline.api.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_URLS = """
    /v1/chat/completions /v1/completions /v1/embeddings /v1/responses
    /score /v1/score /rerank /v1/rerank /v2/rerank /pooling /classify
"""
BATCH_URLS = frozenset(_URLS.split())
"""Endpoints that requests of a batch may ask for, where the server has them."""
MAX_HELD_BYTES = 64 << 20
"""Answers that wait in memory for an earlier one; behind them no request is started."""
_MAX_FAILURES = 3
"""How often a request is tried whose engine has failed under it."""
_REQUESTS_PER_SLOT = 2
"""Of those that run at a time, for each sequence that the engine runs: the second one is ready when the first ends."""


class BatchStopped(Exception):
    """The server takes no more requests; those that are left have no answer."""


class BatchExecutor:
    """Answers lines. All batches of a server share one, and take turns.

    Args:
        app: the server's application.
        llm: its engine.
    """

    def __init__(self, app: FastAPI, llm: AsyncLLM) -> None:
        self._app: ASGIApp = app
        self._llm = llm
        self.urls = frozenset(url for url in BATCH_URLS if _has_endpoint(app, url))
        scheduler, parallel = llm.config.scheduler, llm.config.parallel
        slots = scheduler.max_num_seqs * parallel.data_parallel_size
        self._slots = asyncio.Semaphore(max(1, min(_REQUESTS_PER_SLOT * slots, scheduler.max_num_waiting)))

    async def run(
        self, lines: Iterator[Line], write: Callable[[Answer], None], urls: Collection[str] | None = None
    ) -> None:
        """Answer all lines. `write` gets the answers in the order of the lines, each as soon as it can.

        `urls`: what the requests may ask for; None: all that is in `self.urls`.

        Raises:
            BatchStopped: the server takes no more requests.
            Exception: as `write`.
        """
        fingerprint = self._llm.model.fingerprint
        order = _InOrder(write)
        try:
            for line in lines:
                await order.wait_room()
                await self._slots.acquire()
                task = asyncio.create_task(self._answer(line, fingerprint, self.urls if urls is None else urls))
                task.add_done_callback(lambda _: self._slots.release())
                order.add(task)
            await order.wait_empty()
        finally:
            await order.cancel()

    async def _answer(self, line: Line, fingerprint: str, urls: Collection[str]) -> Answer:
        """The answer to one line.

        Raises:
            BatchStopped: as `run`.
        """
        answer_id = line.answer_id(fingerprint)
        try:
            request = parse_request(line, urls)
        except ApiError as error:
            is_request = not isinstance(error, NoRequest)
            return Answer(answer_id, line.custom_id, error.status_code, error.body, is_request)
        status, body = await self._post_patiently(request.url, bytes(request.body), answer_id)
        return Answer(answer_id, request.custom_id, status, body)

    async def _post_patiently(self, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """Status and body of an answer; a request that was not taken is sent again."""
        num_failures = 0
        while True:
            status, headers, answer = await self._post(url, body, request_id)
            if status not in (429, 503):
                return status, answer
            if self._llm.state() in ("draining", "dead"):
                raise BatchStopped(self._llm.dead_reason or "the server is shutting down")
            # Without the header, the engine had taken the request, and has failed under it.
            num_failures += "retry-after" not in headers
            if num_failures >= _MAX_FAILURES:
                return status, answer
            await asyncio.sleep(float(headers.get("retry-after", "1")))

    async def _post(self, url: str, body: bytes, request_id: str) -> tuple[int, Headers, bytes]:
        """Send one request to the application."""
        has_sent = False
        status, headers = 0, Headers()
        parts: list[bytes] = []

        async def receive() -> Message:
            nonlocal has_sent
            if has_sent:
                await asyncio.Event().wait()  # this client does not leave
            has_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
            else:
                parts.append(message.get("body", b""))

        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"x-request-id", request_id.encode()),
            ],
            "client": None,
            "server": None,
            INSIDE: True,
        }
        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("a request of a batch failed")
            return 500, Headers(), internal_error().body
        answer = b"".join(parts)
        if not headers.get("content-type", "").startswith("application/json"):
            answer = msgspec.json.encode(answer.decode(errors="replace"))
        return status, headers, answer


def _has_endpoint(app: FastAPI, url: str) -> bool:
    scope = {"type": "http", "method": "POST", "path": url, "root_path": "", "headers": []}
    return any(route.matches(scope)[0] == Match.FULL for route in app.routes)


class _InOrder:
    """Tasks whose results are written in the order in which the tasks were added."""

    def __init__(self, write: Callable[[Answer], None]) -> None:
        self._write = write
        self._tasks: deque[asyncio.Task[Answer]] = deque()
        self._num_held = 0
        """Bytes of results that wait for an earlier one."""
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def add(self, task: asyncio.Task[Answer]) -> None:
        """Add a task."""
        self._tasks.append(task)
        task.add_done_callback(self._on_done)

    async def wait_room(self) -> None:
        """Wait until a further task may be started.

        Raises:
            Exception: a task has failed, or a result could not be written.
        """
        await self._wait(lambda: self._num_held <= MAX_HELD_BYTES)

    async def wait_empty(self) -> None:
        """Wait until all results are written; raises as `wait_room`."""
        await self._wait(lambda: not self._tasks)

    async def cancel(self) -> None:
        """End the tasks that have not finished."""
        self._error = self._error or asyncio.CancelledError()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while self._error is None and not holds():
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def _on_done(self, task: asyncio.Task[Answer]) -> None:
        self._changed.set()
        if self._error is not None:
            return
        try:
            self._num_held += len(task.result().body)
            while self._tasks and self._tasks[0].done():
                answer = self._tasks[0].result()
                self._write(answer)
                self._tasks.popleft()
                self._num_held -= len(answer.body)
        except BaseException as error:
            self._error = error
