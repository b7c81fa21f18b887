"""Responses in the background: they are written whether or not a client waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from shardline.server.errors import ApiError, internal_error
from shardline.server.openai.generation import Generation
from shardline.server.openai.responses.writer import ResponseObject, ResponseWriter
from shardline.server.openai.whole_answer import wait_finished
from shardline.server.sse import COMMENT, COMMENT_SECONDS

logger = logging.getLogger(__name__)


class BackgroundRun:
    """One response that is being written; it ends by itself, or by `cancel`."""

    def __init__(
        self,
        writer: ResponseWriter,
        generation: Generation,
        *,
        streams: bool,
        on_end: Callable[[BackgroundRun], None],
    ) -> None:
        """`streams`: whether its events are kept, so that clients can follow it. `on_end`: called when it has ended."""
        self.events: list[bytes] = []
        """Those so far, by their numbers."""
        self.streams = streams
        self._writer = writer
        self._generation = generation
        self._on_end = on_end
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._note_end)

    @property
    def response(self) -> ResponseObject:
        """The response as it stands."""
        return self._writer.response

    async def cancel(self) -> None:
        """End it now, and wait until it has ended."""
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._generation.aclose()  # the task may not have begun

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from number `start` on, as they come; comments while there are none."""
        while True:
            changed = self._changed
            if start < len(self.events):
                new = self.events[start:]
                start += len(new)
                yield b"".join(new)
            elif self._task.done():
                return
            else:
                try:
                    async with asyncio.timeout(COMMENT_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield COMMENT

    async def _run(self) -> None:
        try:
            async with self._generation:
                await self._write()
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a response in the background failed")
            self._add(self._writer.write_error(error if isinstance(error, ApiError) else internal_error()))

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.response.status = "cancelled"
        self._on_end(self)
        self._changed.set()

    async def _write(self) -> None:
        if not self.streams:
            [output] = await wait_finished(self._generation)
            self._writer.write_whole(output)
            return
        events = self._writer.write_events()
        self._add(next(events))
        await wait_finished(self._generation, lambda index, output: self._add(events.send((index, output))))
        self._add(events.send(None))

    def _add(self, body: bytes) -> None:
        if not (body and self.streams):
            return
        self.events += [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]  # JSON has no line breaks
        self._changed.set()
        self._changed = asyncio.Event()
