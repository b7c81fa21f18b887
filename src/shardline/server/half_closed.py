"""A client that sends nothing more, but may still read its answer: whether it has left."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from shardline.server.sse import PROBE_CLIENT

LOOK_SECONDS = 0.25
"""Between two looks at a client that sends nothing more."""
_LOOKS_PER_PROBE = 20
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"


def look_for_client(
    loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, cycle: RequestResponseCycle, number: int = 0
) -> None:
    """Close the connection if the client has left: then its host refuses what it is sent. It looks again until the
    answer is whole; `number`: how often it has looked."""
    if transport.is_closing() or cycle.response_complete:
        return
    if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        transport.abort()
        return
    if number % _LOOKS_PER_PROBE == 0:
        if probe := cycle.scope.get(PROBE_CLIENT):
            probe()  # type: ignore[operator]
        elif not cycle.response_started and cycle.scope["http_version"] == "1.1":
            transport.write(_PROBE)
    loop.call_later(LOOK_SECONDS, look_for_client, loop, transport, cycle, number + 1)
