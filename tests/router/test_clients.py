"""Clients that leave, read slowly, or say no more."""

from __future__ import annotations

import asyncio
import socket
import time
import tracemalloc

import httpx
import pytest

from shardline.router import transcript, upstream
from tests.router.backends import Call, Site, silent


def test_a_client_that_leaves_frees_its_backend(site: Site) -> None:
    async def stream_on(call: Call) -> None:
        await call.begin_stream()
        while True:
            await call.send_event("word")
            await asyncio.sleep(0.01)

    streaming, waiting = site.add_backend(stream_on), site.add_backend(silent)
    site.start_router(policy="round_robin")
    for method in ("GET", "POST"):
        streaming.left = 0
        with site.client.stream(method, "/v1/completions", json={"model": "m", "stream": True}) as answer:
            next(answer.iter_lines())
        site.wait_for(lambda: streaming.left == 1)
    with pytest.raises(httpx.ReadTimeout):
        site.client.post("/v1/completions", json={"model": "m"}, timeout=0.2)
    site.wait_for(lambda: waiting.left == 1)
    site.wait_for(lambda: all(backend.num_requests == 0 for backend in site.fleet.backends))


def test_a_client_that_leaves_cuts_its_backend_within_a_second(site: Site) -> None:
    """Also while the backend sends nothing. The shortest of three times, since other programs may have the cores."""

    async def fall_silent(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("one")
        await silent(call)

    backend = site.add_backend(fall_silent)
    site.start_router()
    seconds: list[float] = []
    for _ in range(3):
        with site.client.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as answer:
            assert next(answer.iter_lines()) == "data: one"
            leaving = time.monotonic()
        site.wait_for(lambda: backend.left > len(seconds))
        seconds.append(time.monotonic() - leaving)
    assert min(seconds) <= 1.0, seconds


@pytest.mark.parametrize("has_length", [False, True])
def test_a_client_that_only_says_no_more_gets_its_stream(site: Site, has_length: bool) -> None:
    async def pause(call: Call) -> None:
        if has_length:
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 22\r\n\r\n")
        else:
            await call.begin_stream()
        for word in (b"one", b"two"):
            data = b"data: %s\n\n" % word
            await call.send(data if has_length else b"%x\r\n%s\r\n" % (len(data), data))
            await asyncio.sleep(0.4)
        if not has_length:
            await call.send(b"0\r\n\r\n")

    site.add_backend(pause)
    site.start_router()
    url = site.client.base_url
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n" + b'{"stream": true}')
        client.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: client.recv(65536), b""))
    body = said.partition(b"\r\n\r\n")[2]
    if has_length:
        assert body == b"data: one\n\ndata: two\n\n"
    else:
        assert body.split(b"\r\n")[1:6:2] == [b"data: one\n\n", b": still working\n\n", b"data: two\n\n"]


def test_half_a_body_is_no_request(site: Site) -> None:
    backend = site.add_backend()
    site.start_router()
    url = site.client.base_url
    for _ in range(3):
        with socket.create_connection((url.host, url.port or 80)) as client:
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n\r\n{"prompt": "half')
        assert site.ask("whole").status_code == 200
    assert [call.fields["prompt"] for call in backend.calls] == ["whole"] * 3


@pytest.mark.parametrize("size", [200, 30_000])
def test_a_slow_client_holds_little(site: Site, size: int) -> None:
    sent = 0

    async def stream_much(call: Call) -> None:
        nonlocal sent
        await call.begin_stream()
        for _ in range((48 << 20) // size):
            await call.send_event("x" * size)
            sent += size
        await call.end_stream()

    site.add_backend(stream_much)
    site.start_router()
    tracemalloc.start()
    try:
        with site.client.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as answer:
            parts = answer.iter_raw()
            received = len(next(parts))
            before = -1
            while before != sent:
                before = sent
                time.sleep(0.3)
            assert sent < 30 << 20, "the backend waits for the client"
            assert held_by_router() <= 256 << 10
            tracemalloc.stop()
            received += sum(map(len, parts))
    finally:
        tracemalloc.stop()
    assert received >= (48 << 20) // size * size


def held_by_router() -> int:
    """Bytes of what a router and its HTTP server read, wrote, and did not get rid of."""
    files = (upstream.__file__, transcript.__file__, "*/httptools_impl.py")
    found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, name) for name in files])
    return sum(one.size for one in found.statistics("filename"))
