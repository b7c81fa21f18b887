"""Requests that are malformed, too large or never whole, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket
import time
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from shardline.config.server import ServerConfig
from shardline.server import connections
from shardline.server.json_body import _StrictRequest
from shardline.server.middleware import MAX_LARGE_BODIES
from shardline.server.refusals import RefusedRequests
from tests.server.conftest import Running, serve, wait_until


def talk(running: Running, *parts: bytes, seconds: float = 5.0) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=seconds) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:
            pass
        return received


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and message of an error in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_malformed_http_gets_a_json_error(shared: Running) -> None:
    assert error_of(talk(shared, b"HELLO\r\n\r\n"))[0] == 400


def test_refused_requests_are_logged_with_addresses_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "refused_requests", RefusedRequests())
    monkeypatch.setattr("shardline.server.refusals.LOG_SECONDS", 0.5)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    with serve() as running:
        for _ in range(50):
            assert error_of(talk(running, b"HELLO\r\n\r\n"))[0] == 400
        assert lines()[0] == "refused a request from 127.0.0.1: 400 Invalid HTTP request received."
        wait_until(lambda: sum(int(line.split()[1]) for line in lines()[1:]) == 49)
        assert len(lines()) <= 25
        assert all("from 127.0.0.1 (" in line for line in lines()[1:])


def test_addresses_of_refused_requests_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse() -> None:
        refused = RefusedRequests()
        for index in range(3000):
            refused.note(f"10.0.{index // 256}.{index % 256}", 400, "oh no")
        assert len(refused._counts) <= 1001
        refused._log_counts()

    asyncio.run(refuse())
    assert "refused 2999 more requests in 10 s, from others (1999), 10.0.0.1 (1)" in caplog.text


def test_a_tunnel_is_refused(shared: Running) -> None:
    assert error_of(talk(shared, b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n"))[0] in (400, 404)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000000000000000000000000000\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n",
        b"CONNECT localhost:22 HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n",
    ],
)
def test_no_second_request_is_smuggled(shared: Running, head: bytes) -> None:
    answer = talk(shared, head + b"Host: x\r\n\r\n0\r\n\r\nGET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    assert error_of(answer)[0] == 400
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_large_headers_are_refused(shared: Running, end: bytes) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    assert error_of(talk(shared, head + b"A: " + b"b" * 70_000 + end))[0] == 431
    many = b"".join(b"A%d: b\r\n" % index for index in range(9000))
    assert error_of(talk(shared, head + many + end))[0] == 431


def test_an_offer_to_upgrade_is_ignored(shared: Running) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection(("127.0.0.1", shared.port), timeout=5) as connection:
        connection.sendall(head + body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "start",
    [b"", b"GET /health HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_half_a_request_meets_its_deadline(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.3)
    with serve() as running:
        began = time.monotonic()
        status, message = error_of(talk(running, start))
        assert status == 408
        assert "in time" in message
        assert time.monotonic() - began < 3
        with running.http() as http:
            assert http.get("/health").status_code == 200


def test_requests_one_after_another(shared: Running) -> None:
    with shared.http() as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "x" * 100_000, "max_tokens": 1}).status_code == 400
            assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_an_answer_of_unknown_length_ends_with_the_connection_in_http_1_0(shared: Running) -> None:
    for fields, end in (({"stream": True}, b"data: [DONE]\n\n"), ({}, b"}")):
        body = json.dumps({"prompt": "a", "max_tokens": 3, **fields}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        head, _, answer = talk(shared, head % len(body) + body).partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"transfer-encoding" not in head
        assert answer.startswith((b"data: {", b"{"))
        assert answer.endswith(end)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_stops_sending_gets_its_answer(shared: Running, stream: bool) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 99, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    shared.engine.seconds_per_token = 0.03
    try:
        with socket.create_connection(("127.0.0.1", shared.port), timeout=5) as connection:
            connection.sendall(head % len(body) + body)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while data := connection.recv(65536):
                received += data
    finally:
        shared.engine.seconds_per_token = 0.0
    answer = received.replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"finish_reason":"stop"' in answer


@pytest.mark.parametrize("trailer", [b"x: " + b"a" * 200_000 + b"\r\n", b"x: y\r\n" * 40_000, b"x" * 200_000])
def test_trailers_are_bounded(shared: Running, trailer: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = talk(shared, head, b"2\r\n{}\r\n0\r\n", trailer)
    assert error_of(answer)[0] == 431


def test_chunks_of_one_byte_are_a_body(shared: Running) -> None:
    body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 1, "user": "x" * 150_000}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    answer = talk(shared, head, b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n", seconds=30.0)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]


def test_the_bodies_under_way_are_bounded() -> None:
    """Those that came first go on, and their bytes count no longer when they have been answered."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 10000\r\n\r\n"
    with serve(ServerConfig(max_request_bytes="10Ki")) as running, contextlib.ExitStack() as stack:
        for _ in range(MAX_LARGE_BODIES):
            early = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            early.sendall(head + b"x" * 9990)
        wait_until(lambda: error_of(talk(running, head, b"x" * 9990))[0] == 429)
        stack.close()
        wait_until(lambda: error_of(talk(running, head, b"x" * 10000))[0] == 400)


def test_a_body_in_chunks_of_a_byte_starts_few_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk's own would be 200 bytes of memory that Python keeps."""
    timers = 0
    start_timer = connections.BoundedHttpProtocol._start_timer

    def counted(protocol: connections.BoundedHttpProtocol) -> None:
        nonlocal timers
        timers += 1
        start_timer(protocol)

    monkeypatch.setattr(connections.BoundedHttpProtocol, "_start_timer", counted)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serve() as running:
        assert error_of(talk(running, head, b"1\r\nx\r\n" * 10_000, b"0\r\n\r\n"))[0] == 400
    assert 0 < timers < 10


def drip(running: Running, head: bytes, parts: int, pause: float) -> tuple[float, bytes]:
    """Send one byte after another; returns how long the server listened, in seconds, and what it answered."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as connection:
        connection.sendall(head)
        answer = b""
        for _ in range(parts):
            readable, _, _ = select.select([connection], [], [], pause)
            if readable:
                with contextlib.suppress(ConnectionError):
                    answer = connection.recv(65536)
                break
            connection.sendall(b"x")
        return time.monotonic() - began, answer


@pytest.mark.slow
def test_a_body_that_drips_meets_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(connections, "WHOLE_BODY_SECONDS", 1.0)
    monkeypatch.setattr(connections, "BODY_BYTES_PER_SECOND", 100)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n"
    with serve() as running:
        seconds, answer = drip(running, head, 100, 0.1)
        assert error_of(answer)[0] == 408
        assert 0.9 < seconds < 2
        seconds, _ = drip(running, head, 30, 0.005)
        assert seconds < 0.9  # it was the client that ended


def test_the_error_of_a_client_that_leaves_holds_no_body() -> None:
    """Errors refer to their frames, and stay until the garbage collector comes."""
    begun: dict[str, Any] = {"type": "http.request", "body": b"a", "more_body": True}
    messages = iter([begun, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def read() -> None:
        await _StrictRequest({"type": "http", "headers": []}, receive).body()

    with pytest.raises(ClientDisconnect) as caught:
        asyncio.run(read())
    frames = [entry.frame for entry in caught.traceback]
    assert not any(b"a" in value for frame in frames for value in frame.f_locals.values() if isinstance(value, list))
