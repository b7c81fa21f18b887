"""What clients hear whose requests or connections are refused before a handler sees them, and what the log says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from http import HTTPStatus

from shardline.limits import describe_file_limit
from shardline.server.errors import ApiError, too_many_connections

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""After a line about a refusal, later ones are counted for that long."""
_MAX_ADDRESSES = 1000
_NAMED = 3


def last_answer(error: ApiError) -> bytes:
    """The bytes of an error after which the connection ends."""
    lines = [
        f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}",
        "content-type: application/json",
        f"content-length: {len(error.body)}",
        *(f"{name.lower()}: {value}" for name, value in (error.headers or {}).items()),
        "connection: close\r\n\r\n",
    ]
    return "\r\n".join(lines).encode() + error.body


def refuse(connection: socket.socket, *, has_tls: bool) -> None:
    """Answer a connection that is too many with 503, without its request, and close it."""
    with contextlib.closing(connection), contextlib.suppress(OSError):
        if not has_tls:
            connection.setblocking(False)
            connection.send(last_answer(too_many_connections()))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(65536)  # what is not read resets the connection, and may take the answer with it


class RefusedRequests:
    """Logs the first refusal at once, and later ones as a count per LOG_SECONDS, with the addresses of the clients."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_counting = False

    def note(self, client: str, status: int, message: str) -> None:
        """A client's request was refused. Call it on the event loop."""
        if not self._is_counting:
            logger.warning("refused a request from %s: %d %s", client, status, message)
            self._wait()
        elif client in self._counts or len(self._counts) < _MAX_ADDRESSES:
            self._counts[client] += 1
        else:
            self._counts["others"] += 1

    def _wait(self) -> None:
        self._is_counting = True
        asyncio.get_running_loop().call_later(LOG_SECONDS, self._log_counts)

    def _log_counts(self) -> None:
        counts, self._counts = self._counts, Counter()
        if not counts:
            self._is_counting = False
            return
        named = [f"{client} ({count})" for client, count in counts.most_common(_NAMED)]
        more = f" and {len(counts) - _NAMED} more" if len(counts) > _NAMED else ""
        logger.warning(
            "refused %d more requests in %g s, from %s%s", counts.total(), LOG_SECONDS, ", ".join(named), more
        )
        self._wait()


class RefusedConnections:
    """Logs the first connection that is refused, and then how many there were in LOG_SECONDS."""

    def __init__(self) -> None:
        self._count = 0

    def note(self) -> None:
        """A connection was refused. Call it on the event loop."""
        self._count += 1
        if self._count == 1:
            self._log_count()
            asyncio.get_running_loop().call_later(LOG_SECONDS, self._reset)

    def _reset(self) -> None:
        if self._count > 1:
            self._log_count()
        self._count = 0

    def _log_count(self) -> None:
        what = "a connection was" if self._count == 1 else f"{self._count} connections were"
        logger.warning("%s refused with 503, since descriptors run out: %s", what, describe_file_limit())


refused_requests = RefusedRequests()
