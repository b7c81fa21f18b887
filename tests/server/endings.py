"""Servers of tests that end as soon as they are told to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

_GRACE_SECONDS = 1.0


def ends_at_once(server: uvicorn.Server) -> Callable[[], None]:
    """Call the result on the server's event loop, and it ends. uvicorn looks ten times a second whether it should, and
    whether connections have closed: for hundreds of servers, half a minute."""
    ended = asyncio.Event()
    state = server.server_state

    async def main_loop() -> None:
        await server.on_tick(0)
        await ended.wait()

    async def shutdown(sockets: list[socket.socket] | None = None) -> None:
        for listening in server.servers:
            listening.close()
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await asyncio.sleep(0.002)  # connections that were just accepted begin
                while state.connections or state.tasks:
                    for connection in list(state.connections):
                        connection.shutdown()
                    await asyncio.sleep(0.002)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()

    server.main_loop, server.shutdown = main_loop, shutdown  # type: ignore[method-assign]
    return ended.set
