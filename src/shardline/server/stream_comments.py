"""Comments in streams of server-sent events that are silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

COMMENT = b": still working\n\n"
COMMENT_SECONDS = 5.0
"""Silence after which a stream gets a comment: proxies and clients end connections that say nothing for long."""


class Comments:
    """Sends a comment when a stream has been silent for a while.

    Args:
        num_bodies: how often the stream has sent something so far.
    """

    def __init__(self, send: Send, num_bodies: Callable[[], int]) -> None:
        self._send = send
        self._num_bodies = num_bodies
        self._num_seen = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(COMMENT_SECONDS, self._look)
        self._sending: asyncio.Task[None] | None = None

    def probe_client(self) -> None:
        """Send a comment now: a client that has left will refuse it."""
        if self._sending is None or self._sending.done():
            self._sending = self._loop.create_task(self._send_comment())

    async def stop(self) -> None:
        """Send no more comments."""
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()  # a client that does not read would hold it for ever
            await asyncio.gather(self._sending, return_exceptions=True)

    def _look(self) -> None:
        num_bodies = self._num_bodies()
        if num_bodies == self._num_seen:
            self.probe_client()
        self._num_seen = num_bodies
        self._timer = self._loop.call_later(COMMENT_SECONDS, self._look)

    async def _send_comment(self) -> None:
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
