"""HTTP/1.1 to one backend: connections that are kept, and answers that are read as they come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

Header = tuple[bytes, bytes]

_READ_BYTES = 16 << 10
"""That are read of an answer at once. With more of them waiting for the client, the backend is read no further."""
_MAX_IDLE = 64
"""Connections that are kept without a request."""
_HEADER_BYTES = 64 << 10
"""Of an answer's headers, and of what comes between two parts of its body."""


class UpstreamError(Exception):
    """A backend has not answered as it must. The message says how.

    `stale`: it has closed a kept connection, as it may at any time. `is_late`: it has a connection, and says nothing.
    """

    def __init__(self, message: str, *, stale: bool = False, is_late: bool = False) -> None:
        super().__init__(message)
        self.stale = stale
        self.is_late = is_late


class Answer:
    """The answer to one request: its head, and its body piece by piece. Close it, or read it to its end."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers: list[Header] = connection.headers

    def header(self, name: bytes) -> bytes:
        """The value of a header, by its name in small letters; empty: there is none."""
        return next((value for key, value in self.headers if key == name), b"")

    async def read(self, timeout: float) -> bytes:
        """The next bytes of the body; empty: it is whole.

        Raises:
            UpstreamError: the backend has failed in the middle, or sends nothing for `timeout` seconds.
        """
        return await self._connection.read(timeout)

    async def read_all(self, timeout: float, limit: int) -> bytes:
        """The whole body, or what is more than `limit` bytes of it.

        Raises:
            UpstreamError: see `read`; or it has not come after `timeout` seconds, drop by drop.
        """
        parts, size = [], 0
        try:
            async with asyncio.timeout(timeout):
                while size <= limit and (part := await self.read(timeout)):
                    parts.append(part)
                    size += len(part)
        except TimeoutError:
            raise UpstreamError(f"its answer was not whole after {timeout:g} s") from None
        return b"".join(parts)

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else cut it, so that the backend stops."""
        self._connection.release()

    def cut(self) -> None:
        """Close the connection."""
        self._connection.close()


async def find_addresses(host: str, port: int) -> list[Any]:
    """The addresses of a host. The look-up of a name has a thread of its own: nothing can end one that hangs, and
    neither other look-ups nor the end of the process wait for it.

    Raises:
        OSError: none is found.
    """
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    with contextlib.suppress(socket.gaierror):
        return [address for *_, address in ask(flags=socket.AI_NUMERICHOST)]
    found: Future[list[Any]] = Future()
    found.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            found.set_result([address for *_, address in ask()])
        except Exception as error:
            found.set_exception(error)

    try:
        threading.Thread(target=look_up, name="look-up", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return await asyncio.wrap_future(found)


class Upstream:
    """The connections to one backend. Its methods belong to one event loop."""

    def __init__(self, url: str, connect_timeout: float, certificates: str | None = None) -> None:
        """`url`: scheme, host, port and the beginning of all paths. `certificates`: a file with those to trust.

        Raises:
            OSError: this file cannot be read.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._tls = ssl.create_default_context(cafile=certificates) if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").encode()
        self._authority = parts.netloc.encode()
        self._connect_timeout = connect_timeout
        self._looking: asyncio.Future[Any] | None = None
        self._idle: deque[_Connection] = deque()
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """Into which all connections read in turns."""

    async def send(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: bytes,
        timeout: float,
        *,
        is_probe: bool = False,
    ) -> Answer:
        """Send a request, and wait up to `timeout` seconds for the head of the answer. `is_probe`: on a new connection.

        Raises:
            UpstreamError: there is no answer.
        """
        lines = [method + b" " + self._prefix + target + b" HTTP/1.1\r\nhost: " + self._authority]
        lines += [name + b": " + value for name, value in headers]
        if body or method not in (b"GET", b"HEAD", b"DELETE"):
            lines.append(b"content-length: %d" % len(body))
        data, has_body = b"\r\n".join([*lines, b"\r\n"]) + body, method != b"HEAD"
        kept = None if is_probe else self._take()
        if kept is not None:
            try:
                return await kept.ask(data, timeout, has_body=has_body, is_kept=True)
            except UpstreamError as error:
                if not error.stale:
                    raise
        connection = await self._connect()
        return await connection.ask(data, timeout, has_body=has_body, is_kept=False)

    async def get(self, path: bytes, headers: Sequence[Header], timeout: float, limit: int) -> tuple[int, bytes]:
        """The status and the body of GET; see `Answer.read_all` and `send`.

        It has a connection of its own, which shows whether the backend still takes new ones.
        """
        answer = await self.send(b"GET", path, [*headers, (b"connection", b"close")], b"", timeout, is_probe=True)
        try:
            return answer.status, await answer.read_all(timeout, limit)
        finally:
            answer.cut()

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.popleft().close()

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
        return None

    def keep(self, connection: _Connection) -> None:
        """Take a connection back whose answer is whole."""
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connect_timeout
        problem: OSError = OSError("its name has no address")
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await self._look_up()
            for num_left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
                try:
                    # A dead address may be silent: those after it have their share of the time.
                    async with asyncio.timeout((deadline - loop.time()) / num_left):
                        return await self._open(address)
                except OSError as error:
                    problem = error
            raise problem
        except TimeoutError:
            raise UpstreamError(f"no connection in {self._connect_timeout:g} s") from None
        except OSError as error:
            raise UpstreamError(f"no connection ({error.strerror or error})") from None

    async def _look_up(self) -> list[Any]:
        """The addresses of the host. Nothing ends a look-up that hangs in its thread: no other one begins meanwhile."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.gather(find_addresses(self._host, self._port), return_exceptions=True)
        [answer] = await asyncio.shield(self._looking)
        if isinstance(answer, BaseException):
            raise answer
        return cast("list[Any]", answer)

    async def _open(self, address: Any) -> _Connection:
        """A connection to one address. The numeric name of an IPv6 address has its scope."""
        loop, name = asyncio.get_running_loop(), self._host if self._tls else None
        host, port = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
        _, connection = await loop.create_connection(
            lambda: _Connection(self), host, int(port), ssl=self._tls, server_hostname=name
        )
        return connection


class _Connection(asyncio.BufferedProtocol):
    """One connection. It carries one request at a time."""

    def __init__(self, pool: Upstream) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.is_lost = False
        self._reset(has_body=True)

    def _reset(self, *, has_body: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_body = has_body
        self.status = 0
        self.headers: list[Header] = []
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._is_paused = False
        self._has_head = self._is_whole = self._may_stay_open = False
        self._is_fresh = True
        """Nothing of the answer has come."""
        self._num_idle_bytes = 0
        """Those that have come since a head, or a part of a body."""
        self._problem = ""

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._is_fresh = False
        self._num_idle_bytes += nbytes
        try:
            self._parser.feed_data(self._pool.buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._problem = "what it sends is not HTTP"
        if self._num_idle_bytes > _HEADER_BYTES:
            self._problem = f"its headers are larger than {_HEADER_BYTES} bytes"
        if self._problem:
            self._transport.abort()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._has_head and not self._is_whole and not self._problem and self._ends_with_connection:
            self._is_whole = True
        self._problem = self._problem or "it has closed the connection"
        self._wake()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("an answer to no question")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if not 100 <= self.status < 600:
            raise ValueError("no status of HTTP")
        if self.status < 200:
            self.headers = []
            return
        self._num_idle_bytes = 0
        self._has_head = True
        names = {name for name, _ in self.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        if not self._has_body:
            self._is_whole = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_idle_bytes = 0
        self._size += len(body)
        if self._size > _READ_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_whole = True
            self._may_stay_open = self._parser.should_keep_alive()  # the parser forgets it after this call

    # What the pool and the answer call.

    async def ask(self, data: bytes, timeout: float, *, has_body: bool, is_kept: bool) -> Answer:
        """Send a request, and wait for the head of the answer. The connection is closed if none comes."""
        self._reset(has_body=has_body)
        self._transport.write(data)
        deadline = self._loop.time() + timeout
        try:
            while not self._has_head:
                if self.is_lost:
                    raise UpstreamError(self._problem, stale=is_kept and self._is_fresh)
                await self._wait(deadline, timeout)
        except BaseException:
            self.close()
            raise
        return Answer(self)

    async def read(self, timeout: float) -> bytes:
        """See `Answer.read`."""
        deadline = self._loop.time() + timeout
        while True:
            if self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._size = 0
                if self._is_paused:
                    self._is_paused = False
                    self._transport.resume_reading()
                return data
            if self._is_whole:
                return b""
            if self.is_lost:
                raise UpstreamError(self._problem)
            await self._wait(deadline, timeout)

    async def _wait(self, deadline: float, timeout: float) -> None:
        self._waiter = self._loop.create_future()
        timer = self._loop.call_at(deadline, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        if self._loop.time() >= deadline:
            self._problem = f"nothing came for {timeout:g} s"
            raise UpstreamError(self._problem, is_late=True)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def release(self) -> None:
        """Keep the connection if another request can follow, else close it."""
        if self._is_reusable:
            self._pool.keep(self)
        else:
            self.close()

    @property
    def _is_reusable(self) -> bool:
        is_read = self._is_whole and self._has_body and not self._parts
        return is_read and not self.is_lost and self._may_stay_open and not self._problem

    def close(self) -> None:
        """Cut the connection."""
        with contextlib.suppress(AttributeError):  # it was never made
            self._transport.abort()
