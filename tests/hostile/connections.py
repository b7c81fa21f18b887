"""Hostile connections: what no body can do. Each takes a port, and returns what was wrong; empty: nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
_BODY = json.dumps({"prompt": "The first", "max_tokens": 1}).encode()
MEGABYTE = 1 << 20


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20.0)


def _talk(port: int, data: bytes) -> bytes:
    """Send bytes, and return the answer."""
    answer = b""
    with _connect(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        while part := connection.recv(65536):
            answer += part
    return answer


def half_bodies(port: int) -> str:
    """Clients that send most of a large body each, and leave."""
    for _ in range(3):
        connections = [_connect(port) for _ in range(8)]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(_HEAD + b"Content-Length: 16000000\r\n\r\n" + b" " * (15 * MEGABYTE))
        for connection in connections:
            connection.close()
    return ""


def endless_trailers(port: int) -> str:
    """Trailers, the headers after a body in chunks, that never end."""
    with _connect(port) as connection:
        try:
            connection.sendall(_CHUNKED + b"%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\n")
            for _ in range(400):
                connection.sendall(b"a: " + b"b" * 60_000 + b"\r\n")
        except ConnectionError:
            return ""
    return "24 MB of trailers were taken"


def small_chunks(port: int) -> str:
    """A body in chunks of a byte each."""
    body = _BODY[:-1] + b" " * 100_000 + b"}"
    wire = b"".join(b"1\r\n" + body[place : place + 1] + b"\r\n" for place in range(len(body)))
    answer = _talk(port, _CHUNKED + wire + b"0\r\n\r\n")
    return "" if answer[9:12] in (b"200", b"400", b"413") else f"chunks of a byte: {answer[:200]!r}"


def pipelined(port: int) -> str:
    """Many requests before the first answer is read."""
    request = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    count = _talk(port, request * 500 + last).count(b"HTTP/1.1 200")
    return "" if count == 501 else f"{count} of 501 pipelined requests were answered"


def many_idle(port: int) -> str:
    """Many connections that say nothing, while another client asks something."""
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(_connect(port))
        began = time.monotonic()
        answer = _talk(port, _HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
        seconds = time.monotonic() - began
    return "" if answer[9:12] == b"200" and seconds < 20 else f"beside idle connections: {answer[:200]!r}, {seconds} s"


def odd_requests(port: int) -> str:
    """Requests that are no usual HTTP: each has one answer that is no 5xx."""
    lines = (
        b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"TRACE / HTTP/1.1", b"HEAD /v1/models HTTP/1.1",
        b"GET /v1/models/%ff%00%0d%0aX:y HTTP/1.1", b"GET /v1/models/" + b"%2e" * 9000 + b" HTTP/1.1",
        b"GET / HTTP/1.0",
        b"PRI * HTTP/2.0", b"GET /v1/responses/%00 HTTP/1.1", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1",
        b"GET /v1/models HTTP/1.1\r\nX-Request-Id: \xff" + b"a" * 60_000,
        b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 9000 + b"c: d",
        b"GET /v1/completions HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==",
    )  # fmt: skip
    wrong = []
    for line in lines:
        answer = _talk(port, line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        if answer.count(b"HTTP/1.1 ") != 1 or answer[9:10] == b"5":
            wrong.append(f"{line[:60]!r}: {answer[:200]!r}")
    return "; ".join(wrong)


ALL: tuple[Callable[[int], str], ...] = (
    half_bodies,
    endless_trailers,
    small_chunks,
    pipelined,
    many_idle,
    odd_requests,
)
