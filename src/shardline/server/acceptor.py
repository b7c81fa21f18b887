"""How many connections are accepted: as many as descriptors can be spared for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from shardline.limits import file_limit
from shardline.server.connections import BoundedHttpProtocol
from shardline.server.errors import too_many_connections
from shardline.server.refusals import RefusedConnections, refuse

logger = logging.getLogger(__name__)

_BATCH = 64
"""Connections that are accepted before anything else is done."""
_MAX_OPEN_REFUSALS = 8
"""Refused connections that may send their request first. If there are more, they are closed at once."""
_FILES_OF_SERVER = 28
"""Descriptors that the server may need at any time, beside those of restarts: for sandboxes, for the most part."""
_FILES_OF_ENGINE = 6
_PAUSE_SECONDS = 0.5


def reserved_files(num_engines: int) -> int:
    """Descriptors that connections must leave."""
    return _FILES_OF_SERVER + _FILES_OF_ENGINE * num_engines


class Acceptor:
    """Accepts the connections of one listening socket, and refuses those that are too many with 503."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], BoundedHttpProtocol],
        tls: ssl.SSLContext | None,
        reserved: int,
    ) -> None:
        """`reserved`: descriptors that are kept free, but at most half of all."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        limit = file_limit()
        self._end = limit - min(reserved, limit // 2)
        """The first number of a descriptor that no client gets. The kernel gives the lowest that is free."""
        self._opening: set[asyncio.Task[None]] = set()
        self._refused = RefusedConnections()
        self._resuming: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more; connections go on."""
        self._pause(None)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # somebody else has used what was kept free; clients wait
                logger.warning("no connection can be accepted: %s", error)
                self._pause(_PAUSE_SECONDS)
                return
            number = connection.fileno()
            if number >= self._end:
                self._refused.note()
            if number >= self._end + _MAX_OPEN_REFUSALS:
                refuse(connection, has_tls=self._tls is not None)
                continue
            task = self._loop.create_task(self._open(connection, is_refused=number >= self._end))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, *, is_refused: bool) -> None:
        def make_protocol() -> BoundedHttpProtocol:
            protocol = self._make_protocol()
            if is_refused:
                protocol.refusal = too_many_connections()
            return protocol

        try:
            if connection.family != socket.AF_UNIX:  # --uds: such a socket has no such option
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(make_protocol, connection, ssl=self._tls)
        except OSError as error:  # a handshake of TLS has failed, or the client has left
            logger.debug("a connection could not be opened: %s", error)
            connection.close()

    def _pause(self, seconds: float | None) -> None:
        """Accept nothing for some seconds; None: nor later."""
        self._loop.remove_reader(self._listener)
        if self._resuming is not None:
            self._resuming.cancel()
        if seconds is not None:
            self._resuming = self._loop.call_later(seconds, self._loop.add_reader, self._listener, self._accept)


class HttpServer(uvicorn.Server):
    """uvicorn with our acceptor, and without its signal handlers: the server lets requests drain."""

    def __init__(self, config: uvicorn.Config, reserved: int) -> None:
        """`reserved`: descriptors that connections leave."""
        super().__init__(config)
        self._reserved = reserved

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup([])
        make_protocol = partial(BoundedHttpProtocol, self.config, self.server_state, self.lifespan.state)
        self.servers = [
            Acceptor(listener, make_protocol, self.config.ssl, self._reserved)  # type: ignore[misc]
            for listener in sockets or []
        ]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
