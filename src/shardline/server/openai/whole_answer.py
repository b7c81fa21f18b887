"""Waits for the whole answer, where it is not sent as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shardline.api.outputs import RequestOutput
from shardline.server.openai.generation import Generation


async def wait_finished(
    generation: Generation, write: Callable[[int, RequestOutput], None] | None = None
) -> list[RequestOutput]:
    """For each prompt, the whole output; `write` is called with each update, as in `Generation.listen`.

    Raises:
        ApiError: as `Generation.observe`.
    """
    done = asyncio.get_running_loop().create_future()

    def on_update(index: int, output: RequestOutput) -> None:
        if done.done():
            return
        try:
            generation.observe(index, output)
            if write is not None:
                write(index, output)
        except Exception as error:
            done.set_exception(error)
        else:
            if output.finished and generation.finished:
                done.set_result(None)

    generation.listen(on_update)
    try:
        await done
    finally:
        generation.listen(None)
    return generation.outputs
