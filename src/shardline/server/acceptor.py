"""Accepts connections as long as descriptors are left for what must not fail: restarts of engines, and probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from shardline.limits import describe_file_limit, file_limit
from shardline.server.errors import too_many_connections
from shardline.server.http_protocol import BoundedHttpProtocol, last_answer

_BATCH = 64
"""Connections that are accepted before anything else is done."""
_POLITE = 8
"""Refused connections that may send their request first. If there are more, they are closed at once."""
_FILES_OF_SERVER = 28
"""Descriptors that the server may need at any time, beside those of restarts: for sandboxes, for the most part."""
_FILES_OF_ENGINE = 6
_PAUSE_SECONDS = 0.5
_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


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
        self._num_refused = 0
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
                _log.warning("no connection can be accepted: %s", error)
                self._pause(_PAUSE_SECONDS)
                return
            number = connection.fileno()
            if number >= self._end:
                self._note_refusal()
            if number >= self._end + _POLITE:
                self._refuse(connection)
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
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(make_protocol, connection, ssl=self._tls)
        except OSError as error:  # a handshake of TLS has failed, or the client has left
            _log.debug("a connection could not be opened: %s", error)
            connection.close()

    def _refuse(self, connection: socket.socket) -> None:
        with contextlib.closing(connection), contextlib.suppress(OSError):
            if self._tls is None:
                connection.setblocking(False)
                connection.send(last_answer(too_many_connections()))
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)  # what is not read resets the connection, and may take the answer with it

    def _note_refusal(self) -> None:
        self._num_refused += 1
        if self._num_refused == 1:
            self._log_refusals()
            self._loop.call_later(_LOG_SECONDS, self._reset_refusals)

    def _reset_refusals(self) -> None:
        if self._num_refused > 1:
            self._log_refusals()
        self._num_refused = 0

    def _log_refusals(self) -> None:
        what = "a connection was" if self._num_refused == 1 else f"{self._num_refused} connections were"
        _log.warning("%s refused with 503, since descriptors run out: %s", what, describe_file_limit())

    def _pause(self, seconds: float | None) -> None:
        """Accept nothing for some seconds; None: nor later."""
        self._loop.remove_reader(self._listener)
        if self._resuming is not None:
            self._resuming.cancel()
        if seconds is not None:
            self._resuming = self._loop.call_later(seconds, self._loop.add_reader, self._listener, self._accept)
