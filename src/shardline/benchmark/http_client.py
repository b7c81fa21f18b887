"""A small HTTP/1.1 client for load: kept connections, callbacks instead of streams, no work per header.

An exchange costs some tens of microseconds, so that the client does not limit what it measures.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Protocol, cast
from urllib.parse import SplitResult, urlsplit

import httptools

_CONNECT_SECONDS = 30.0


class Exchange(Protocol):
    """One request, and what becomes of it. `data` is one piece of the answer's body, `now` time.perf_counter()."""

    request: bytes

    def on_sent(self, now: float) -> None:
        """The request was handed to the network."""

    def on_status(self, status: int, reason: str) -> None:
        """The answer has begun; `reason`: what its first line says after the status."""

    def on_body(self, data: bytes, now: float) -> None:
        """A part of the answer's body has come."""

    def on_end(self, now: float) -> None:
        """The answer is whole."""

    def on_failure(self, cause: str, detail: str, now: float) -> None:
        """There will be no whole answer."""


def split_url(url: str) -> tuple[SplitResult, str, int]:
    """The parts of a server's URL, its host and its port.

    Raises:
        ValueError: it has no scheme http or https, no host, or an impossible port.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(f"the server's URL {url!r} is none: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the server's URL must look like http://127.0.0.1:8000, got {url!r}")
    return parts, parts.hostname, port


class HttpClient:
    """Sends exchanges to one server over as many connections as are needed at a time.

    Raises:
        ValueError: the URL has no scheme http or https, or no host.
    """

    def __init__(self, base_url: str, *, insecure: bool = False) -> None:
        parts, self.host, self.port = split_url(base_url)
        self.base_path = parts.path.rstrip("/")
        self.netloc = parts.netloc.rsplit("@", 1)[-1]
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        """The lines before a body, without its length and the empty line."""
        lines = [f"{method} {self.base_path}{path} HTTP/1.1", f"Host: {self.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        for line in lines:
            if "\r" in line or "\n" in line or max(line) > "\xff":
                raise ValueError(f"a header must be one line in Latin-1; {line.partition(':')[0]!r} is not")
        return ("\r\n".join(lines) + "\r\n").encode("latin-1")

    def send(self, exchange: Exchange) -> None:
        """Begin an exchange; its callbacks tell what becomes of it."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.start(exchange)
                return
        self._connect_for(exchange)

    async def check(self) -> None:
        """Connect once.

        Raises:
            OSError: the server cannot be reached.
        """
        async with asyncio.timeout(_CONNECT_SECONDS):
            connection = await self._connect()
        self._idle.append(connection)

    async def fetch(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body of one answer.

        Raises:
            OSError: there was no whole answer.
        """
        request = self.head(method, path, headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body
        waiting = _Whole(request, asyncio.get_running_loop().create_future())
        self.send(waiting)
        return await waiting.done

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()

    def give_back(self, connection: _Connection) -> None:
        """Take back a connection whose exchange has ended."""
        self._idle.append(connection)

    def forget(self, connection: _Connection, exchange: Exchange | None, *, retry: bool) -> None:
        """Note that a connection is gone; `retry`: send its exchange again over a new one."""
        self._open.discard(connection)
        if retry and exchange is not None:
            self._connect_for(exchange)

    def _connect_for(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._connect_and_start(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_and_start(self, exchange: Exchange) -> None:
        exchange.on_sent(time.perf_counter())  # a server that is slow to accept must not look fast
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await self._connect()
        except TimeoutError:
            exchange.on_failure("connect timeout", f"no connection within {_CONNECT_SECONDS} s", time.perf_counter())
        except ConnectionRefusedError as error:
            exchange.on_failure("connection refused", str(error), time.perf_counter())
        except OSError as error:
            exchange.on_failure("cannot connect", str(error), time.perf_counter())
        else:
            connection.start(exchange, fresh=True)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), self.host, self.port, ssl=self._tls)
        self._open.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One connection; it carries one exchange at a time."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._fresh = True
        self._begun = False
        self._until_close = True
        self._reason = b""
        self._now = 0.0

    @property
    def usable(self) -> bool:
        """Whether it can carry a further exchange."""
        return self._transport is not None and not self._transport.is_closing()

    def start(self, exchange: Exchange, *, fresh: bool = False) -> None:
        """Send a request; `fresh`: it is the first one of this connection, and its time has been noted."""
        assert self._transport is not None
        self._exchange = exchange
        self._fresh, self._begun, self._until_close = fresh, False, True
        if not fresh:
            exchange.on_sent(time.perf_counter())
        self._transport.write(exchange.request)

    def abort(self) -> None:
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("malformed answer", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        retry = exchange is not None and not self._fresh and not self._begun
        self._client.forget(self, exchange, retry=retry)
        if exchange is None or retry:
            return
        now = time.perf_counter()
        if self._begun and self._until_close and error is None:
            exchange.on_end(now)
        else:
            exchange.on_failure("connection closed", str(error or "the server closed the connection"), now)

    def on_message_begin(self) -> None:
        """httptools: an answer begins."""
        self._reason = b""

    def on_status(self, reason: bytes) -> None:
        """httptools: a piece of what the first line says after the status."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header of the answer."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        """httptools: the answer's headers are whole."""
        if self._exchange is not None:
            self._exchange.on_status(self._parser.get_status_code(), self._reason.decode("latin-1"))

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the answer's body."""
        if self._exchange is not None:
            self._exchange.on_body(data, self._now)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        if self._exchange is None or self._parser.get_status_code() < 200:
            return
        exchange, self._exchange = self._exchange, None
        keep = self._parser.should_keep_alive()
        if keep and self.usable:
            self._client.give_back(self)
        else:
            assert self._transport is not None
            self._transport.close()
        exchange.on_end(self._now)

    def _fail(self, cause: str, detail: str) -> None:
        exchange, self._exchange = self._exchange, None
        assert self._transport is not None
        self._transport.abort()
        if exchange is not None:
            exchange.on_failure(cause, detail, self._now)


class _Whole:
    """An exchange whose answer is collected."""

    def __init__(self, request: bytes, done: asyncio.Future[tuple[int, bytes]]) -> None:
        self.request = request
        self.done = done
        self._status = 0
        self._body: list[bytes] = []

    def on_sent(self, now: float) -> None:
        """See Exchange."""

    def on_status(self, status: int, reason: str) -> None:
        self._status = status

    def on_body(self, data: bytes, now: float) -> None:
        self._body.append(data)

    def on_end(self, now: float) -> None:
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._body)))

    def on_failure(self, cause: str, detail: str, now: float) -> None:
        if not self.done.done():
            self.done.set_exception(OSError(f"{cause}: {detail}"))
