"""Connections: how many are accepted, how long they may take, and how much they may send before a handler sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shardline.limits import file_limit
from shardline.server.errors import ApiError, too_many_connections
from shardline.server.half_closed import LOOK_SECONDS, look_for_client
from shardline.server.refusals import RefusedConnections, last_answer, refuse, refused_requests
from shardline.server.sse import CUT, WRITE_NOW

MAX_HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 20.0
"""From the connection, or from the first byte of a later request, to the last header."""
BODY_SECONDS = 10.0
"""Between two parts of a body."""
WHOLE_BODY_SECONDS = 60.0
BODY_BYTES_PER_SECOND = 1000
"""A whole body may take that long, and a second more for that many bytes that have arrived."""

REFUSAL_SECONDS = 1.0
"""From a connection that is refused to the end of its request. After that, the answer comes without a request."""
_PROBES = (b"/live", b"/ready", b"/health", b"/ping", b"/metrics")
"""Paths that answer on refused connections, too: a server is not dead because it has many clients."""

_CHUNK_HEADS = [b"%x\r\n" % length for length in range(1024)]
"""What precedes a chunk of each length."""
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)

_BATCH = 64
"""Connections that are accepted before anything else is done."""
_MAX_OPEN_REFUSALS = 8
"""Refused connections that may send their request first. If there are more, they are closed at once."""
_FILES_OF_SERVER = 28
"""Descriptors that the server may need at any time, beside those of restarts: for sandboxes, for the most part."""
_FILES_OF_ENGINE = 6
_PAUSE_SECONDS = 0.5

logger = logging.getLogger(__name__)


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with these bounds, and with errors in OpenAI's shape.

    Offers to upgrade the connection, such as Java's clients make, are ignored, as HTTP allows.
    """

    _num_header_bytes = 0
    _in_headers = True
    _num_idle_bytes = 0
    """Bytes behind the headers that have not been part of the body: trailers, and what precedes chunks."""
    _body_began: float | None = None
    """When the headers were whole; None: a connection that is refused, which has no time for a body."""
    _num_body_bytes = 0
    _deadline: float | None = None
    """The end of the client's time, on the loop's clock; None: it is not its turn."""
    _timer: asyncio.TimerHandle | None = None
    refusal: ApiError | None = None
    """The answer to whatever the client asks, if there are too many connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait(HEADER_SECONDS if self.refusal is None else REFUSAL_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes of a request."""
        if self._in_headers:
            if self._num_header_bytes == 0 and self.refusal is None:
                self._wait(HEADER_SECONDS)
            self._num_header_bytes += len(data)
            head, end, body = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + body
        self._unset_keepalive_if_required()
        self._num_idle_bytes += 0 if self._in_headers else len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        except httptools.HttpParserUpgrade:
            self._refuse(400, "CONNECT is not supported.")
            return
        num_bytes = self._num_header_bytes if self._in_headers else self._num_idle_bytes
        if num_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Begin to answer; the body may still be on its way."""
        self._in_headers = False
        if sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse(431, f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.")
            return
        if self.refusal is not None:
            if self.url.partition(b"?")[0] not in _PROBES:
                return  # the answer follows the body: a client that still writes may not read it
            self.refusal = None
            super().on_headers_complete()
            self.cycle.keep_alive = False
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.1":
            self.scope[WRITE_NOW] = partial(_write_chunk, self.transport, self.flow)  # type: ignore[literal-required]
        else:
            self.cycle.send = partial(_send_whole, self.cycle, self.cycle.send)  # type: ignore[method-assign]
        self.scope[CUT] = self.transport.abort  # type: ignore[literal-required]
        self._body_began, self._num_body_bytes = self.loop.time(), 0
        self._wait(BODY_SECONDS)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_idle_bytes = 0
        if self.cycle is not None:
            super().on_body(body)
            if self._body_began is not None:
                self._num_body_bytes += len(body)
                rate_deadline = self._body_began + WHOLE_BODY_SECONDS + self._num_body_bytes / BODY_BYTES_PER_SECOND
                self._wait(min(BODY_SECONDS, rate_deadline - self.loop.time()))

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_headers, self._num_header_bytes, self._num_idle_bytes = True, 0, 0
        self._deadline = None
        if self.refusal is not None:
            self._answer(self.refusal)
        elif self.cycle is not None:
            super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. It may still read the answer, or have left."""
        cycle = self.cycle
        if self.scheme == "https" or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = False
        self.loop.call_later(LOOK_SECONDS, look_for_client, self.loop, self.transport, cycle)
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        if not self.transport.is_closing():
            self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        self._answer(ApiError(status, message))

    def _answer(self, error: ApiError) -> None:
        """Answer and close the connection, unless the answer of an earlier request is being sent."""
        self._deadline = None
        refused_requests.note(self.client[0] if self.client else "-", error.status_code, str(error.detail))
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(last_answer(error))
        self.transport.close()

    def _wait(self, seconds: float) -> None:
        """Give the client this much time.

        The timer runs on where it can, and looks at the deadline: a body in chunks of a byte moves that thousands of
        times, and Python would keep the memory of as many timers.
        """
        self._deadline = self.loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            self._start_timer()

    def _start_timer(self) -> None:
        assert self._deadline is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._deadline is None or self.transport.is_closing():
            return
        if self._deadline > self.loop.time():
            self._start_timer()
        elif self.refusal is not None:
            self._answer(self.refusal)
        else:
            part = "headers" if self._in_headers else "body"
            self._refuse(408, f"The request's {part} did not arrive in time.")


async def _send_whole(cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any) -> None:
    """Send a part of an answer to a client of HTTP/1.0, which knows no chunks: the connection's end is that of a body
    without a known length."""
    if message["type"] == "http.response.start":
        if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _write_chunk(transport: asyncio.Transport, flow: FlowControl, body: bytes) -> bool:
    """Write a part of a body without a known length, if the connection takes it now."""
    if flow.write_paused or transport.is_closing():
        return False
    length = len(body)
    head = _CHUNK_HEADS[length] if length < len(_CHUNK_HEADS) else b"%x\r\n" % length
    transport.write(b"".join((head, body, b"\r\n")))
    return True


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
