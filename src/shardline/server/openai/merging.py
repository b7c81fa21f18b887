"""The outputs of several prompts as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.api.async_llm import RequestStream

_Queue = asyncio.Queue[int | BaseException | None]


async def merge_updates(streams: Sequence[RequestStream]) -> AsyncGenerator[int, None]:
    """The index of a stream each time that its output changes; an error of a stream is raised here."""
    # One slot for each prompt: if the reader is slow, the forwarders wait, and the streams merge their updates.
    queue: _Queue = asyncio.Queue(len(streams))
    forwarders = [asyncio.create_task(_forward_updates(stream, index, queue)) for index, stream in enumerate(streams)]
    try:
        running = len(forwarders)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for forwarder in forwarders:
            forwarder.cancel()
        await asyncio.gather(*forwarders, return_exceptions=True)


async def _forward_updates(stream: RequestStream, index: int, queue: _Queue) -> None:
    try:
        async for _ in stream:
            await queue.put(index)
    except Exception as error:  # the reader raises it again
        await queue.put(error)
    await queue.put(None)
