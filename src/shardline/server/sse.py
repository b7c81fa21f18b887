"""Server-sent events: the form in which OpenAI streams an answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardline.server.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event that carries `data`, JSON without line breaks."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """An answer that sends each item of `events` (one or several whole events) as it comes, then `data: [DONE]`.

    An error in the middle becomes an error event: the status line is long gone by then. `source`, what the events are
    made from, is left whatever happens, also where the first event was never asked for.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AbstractAsyncContextManager[Any]) -> None:
        # Proxies such as nginx must not collect the events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. A client that reads slowly makes `send` wait: nothing piles up here."""
        last = DONE
        async with self._source, aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for item in events:
                    await send({"type": "http.response.body", "body": item, "more_body": True})
            except ApiError as error:
                last = event(error.body) + DONE
            except Exception:
                logger.exception("a stream failed")
                last = event(internal_error().body) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})
