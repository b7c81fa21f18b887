"""The router between real clients and backends that fail in every way."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.router.backends import (
    Backend,
    Behaviour,
    Call,
    Site,
    cut,
    fail,
    refuse,
    say_name,
    silent,
)


async def babble(call: Call) -> None:
    await call.send(b"this is not HTTP\r\n\r\n")


async def no_status(call: Call) -> None:
    await call.answer(600, {})


async def endless_headers(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        await call.send(b"x" * 65536)


async def drip(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500000\r\n\r\n{")
    while True:
        await call.send(b" ")
        await asyncio.sleep(0.01)


async def half_an_answer(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
    call.cut()


async def no_token(call: Call) -> None:
    await call.begin_stream()
    call.cut()


async def full(call: Call) -> None:
    await call.answer(429, {"error": {"message": "full"}}, retry_after="7")


@pytest.mark.parametrize("behave", [fail, cut, babble, endless_headers, half_an_answer, no_token, full])
def test_what_fails_before_the_first_token_is_given_to_another(site: Site, behave) -> None:
    bad, good = site.add_backend(behave), site.add_backend()
    site.start_router(policy="round_robin")
    for number in range(4):
        assert site.ask(str(number)).json()["prompt"] == str(number)
    assert bad.calls
    assert len(good.calls) == 4


def test_a_status_that_http_does_not_have_is_a_failure(site: Site) -> None:
    site.add_backend(no_status)
    site.start_router()
    assert site.ask().status_code == 502


@pytest.mark.parametrize("behave", [silent, drip])
def test_a_silent_backend_is_left_after_its_time(site: Site, behave: Behaviour) -> None:
    site.add_backend(behave)
    site.add_backend()
    site.start_router(policy="round_robin", answer_timeout=0.3)
    assert site.ask().status_code == 200
    assert site.ask().status_code == 200


def test_a_backend_that_always_fails_is_left_alone_for_a_while(site: Site, monkeypatch) -> None:
    monkeypatch.setattr("shardline.router.breaker._FIRST_SECONDS", 60.0)
    bad = site.add_backend(fail)
    site.add_backend()
    site.start_router(policy="round_robin")
    for _ in range(20):
        assert site.ask().status_code == 200
    assert len(bad.calls) == 3
    assert "shardline_router:breaker_open" in site.client.get("/metrics").text
    bad.behave = say_name
    site.fleet.backends[0].breaker._open_until = time.monotonic()
    for _ in range(4):
        site.ask()
    assert len(bad.calls) > 3


def test_refusals_of_the_request_are_the_clients(site: Site) -> None:
    backends = [site.add_backend(refuse), site.add_backend(refuse)]
    site.start_router()
    for _ in range(10):
        answer = site.ask()
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "bad")
    assert sum(len(backend.calls) for backend in backends) == 10, "none was tried twice"
    assert all(backend.breaker.state(0.0) == "closed" for backend in site.fleet.backends)


def test_full_backends_are_named_and_left_alone(site: Site) -> None:
    site.add_backend(full)
    site.add_backend(full)
    site.start_router(max_queue=0)
    answer = site.ask()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    site.backends[1].behave = say_name
    site.fleet.backends[1].busy_until = 0.0
    site.backends[0].calls.clear()
    assert site.ask().status_code == 200
    assert not site.backends[0].calls, "it has asked to be left alone"


def test_when_all_fail_the_client_hears_which_and_why(site: Site) -> None:
    site.add_backend(cut)
    site.add_backend(cut)
    site.start_router()
    answer = site.ask()
    assert answer.status_code == 502
    message = answer.json()["error"]["message"]
    assert all(f"{backend.url}: it has closed the connection" in message for backend in site.backends)
    site.backends[0].behave = site.backends[1].behave = fail
    assert site.ask().json()["error"]["message"] == "broken"


def test_retries_are_bounded(site: Site) -> None:
    backends = [site.add_backend(cut) for _ in range(4)]
    site.start_router(retries=1)
    site.ask()
    assert sum(len(backend.calls) for backend in backends) == 2


def test_retries_are_at_most_a_fifth_of_the_requests(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.router.breaker._FAILURES", 1000)  # or the breakers would spare the backends
    backends = [site.add_backend(fail) for _ in range(3)]
    site.start_router()
    assert {site.ask().status_code for _ in range(60)} == {500}
    retries = sum(len(backend.calls) for backend in backends) - 60
    assert 20 <= retries <= 10 + 60 // 5, "ten are in reserve"


def test_a_stream_that_is_cut_ends_with_an_error(site: Site) -> None:
    async def cut_later(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("one")
        await asyncio.sleep(0.05)
        call.cut()

    site.add_backend(cut_later)
    other = site.add_backend()
    site.start_router(policy="round_robin")
    events = [line for line in site.ask(stream=True).text.split("\n\n") if line]
    assert events[0] == "data: one"
    error = json.loads(events[1].removeprefix("data: "))["error"]
    assert error["code"] == "backend_failed"
    assert site.backends[0].url in error["message"]
    assert events[2] == "data: [DONE]"
    assert not other.calls, "a client that has tokens gets no others"
    for backend in site.backends:
        backend.behave = cut_later
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    events = [line for line in site.client.post("/cohere/v2/chat", json=body).text.split("\n\n") if line]
    ended = json.loads(events[1].removeprefix("data: "))
    assert (ended["type"], ended["delta"]["finish_reason"]) == ("message-end", "ERROR")
    assert "failed in the middle" in ended["delta"]["error"]
    assert events[2] == "data: [DONE]"


def test_half_an_event_is_never_a_client_s(site: Site) -> None:
    for end in (b"\n\n", b"\r\n\r\n"):

        async def half_an_event(call: Call, end: bytes = end) -> None:
            await call.begin_stream()
            for data in (b"data: one" + end + b"data: t", b'wo {"half'):
                await call.send(b"%x\r\n%s\r\n" % (len(data), data))
                await asyncio.sleep(0.02)
            await call.send(b"500\r\ndata: half a chunk")
            call.cut()

        site.add_backend(half_an_event)
    site.start_router(policy="round_robin")
    for _ in range(2):
        answer = site.ask(stream=True)
        events = [line for line in answer.text.splitlines() if line]
        assert (events[0], json.loads(events[1][6:])["error"]["code"]) == ("data: one", "backend_failed")
        assert events[2:] == ["data: [DONE]"]


def test_a_stream_that_falls_silent_ends_with_an_error(site: Site) -> None:
    async def fall_silent(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("one")
        await silent(call)

    backend = site.add_backend(fall_silent)
    site.start_router(answer_timeout=0.3)
    events = [line for line in site.ask(stream=True).text.splitlines() if line]
    assert (events[0], events[2]) == ("data: one", "data: [DONE]")
    assert "nothing came for 0.3 s" in json.loads(events[1][6:])["error"]["message"]
    site.wait_for(lambda: backend.left == 1)


def test_without_a_backend_the_answer_is_503_at_once(site: Site) -> None:
    site.start_router()
    answer = site.ask()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_backend"
    assert site.client.get("/ready").status_code == 503
    assert site.client.get("/live").status_code == 200


def test_a_backend_that_dies_is_left_before_a_request_meets_it(site: Site) -> None:
    first, _ = site.add_backend(), site.add_backend()
    site.start_router()
    assert first.server is not None
    site.run(_close(first))
    site.wait_for(lambda: not site.fleet.backends[0].is_ready)
    assert site.ask().status_code == 200
    assert "no connection" in site.client.get("/router/status").json()["backends"][0]["problem"]


async def _close(backend: Backend) -> None:
    assert backend.server is not None
    backend.server.close()


def test_kept_connections_that_a_backend_closes_cost_no_request(site: Site) -> None:
    async def answer_and_close(call: Call) -> None:
        await say_name(call)
        call.writer.close()

    site.add_backend(answer_and_close)
    site.start_router(retries=0)
    assert [site.ask().status_code for _ in range(20)] == [200] * 20
