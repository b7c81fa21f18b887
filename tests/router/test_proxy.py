"""Requests and answers that the router hands on."""

from __future__ import annotations

import asyncio
import time

import pytest

from shardline.config.server import ServerConfig
from tests.router.backends import (
    Behaviour,
    Call,
    Site,
    cut,
    fail,
    refuse,
    remove_backend,
    say_name,
    set_event,
    stream_words,
)


def test_a_request_and_its_answer_go_through(site: Site) -> None:
    backend = site.add_backend()
    site.start_router()
    answer = site.client.post(
        "/v1/completions?a=b",
        json={"model": "m", "prompt": "é"},
        headers={"Authorization": "Bearer key", "X-Request-Id": "r1", "X-Other": "o", "Connection": "keep-alive"},
    )
    assert (answer.status_code, answer.json()["prompt"]) == (200, "é")
    assert answer.headers["x-request-id"] == "r1"
    [call] = backend.calls
    assert (call.method, call.path, call.fields) == ("POST", "/v1/completions?a=b", {"model": "m", "prompt": "é"})
    assert call.headers["authorization"] == "Bearer key"
    assert call.headers["x-request-id"] == "r1"
    assert call.headers["x-other"] == "o"


@pytest.mark.parametrize("behave", [say_name, stream_words])
def test_connections_to_backends_are_used_again(site: Site, behave: Behaviour) -> None:
    backend = site.add_backend(behave)
    site.start_router(health_interval=5.0)
    before = backend.num_connections
    for _ in range(6):
        assert site.ask().status_code == 200
    assert backend.num_connections - before <= 1


def test_a_stream_goes_through_as_it_comes(site: Site) -> None:
    go_on = asyncio.Event()

    async def wait_between(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("one")
        await go_on.wait()
        await call.send_event("two")
        await call.end_stream()

    site.add_backend(wait_between)
    site.start_router()
    with site.client.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: one"
        site.run(set_event(go_on))
        assert [line for line in lines if line] == ["data: two", "data: [DONE]"]


def test_models_are_merged_and_requests_go_where_their_model_is(site: Site) -> None:
    first, second = site.add_backend(models=["a", "both"]), site.add_backend(models=["b", "both"])
    site.start_router()
    assert [entry["id"] for entry in site.client.get("/v1/models").json()["data"]] == ["a", "both", "b"]
    for _ in range(3):
        assert site.ask(model="b").status_code == 200
    assert (len(first.calls), len(second.calls)) == (0, 3)
    answer = site.ask(model="c")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    message = answer.json()["error"]["message"]
    assert "a, both, b" in message
    body = {"model": "c", "messages": [{"role": "user", "content": "hi"}]}
    answers = [site.client.post(path, json=body).json() for path in ("/v1/messages", "/cohere/v2/chat")]
    assert answers == [
        {"type": "error", "error": {"type": "not_found_error", "message": message}},
        {"message": message},
    ]


def test_what_one_backend_keeps_is_found(site: Site) -> None:
    async def not_here(call: Call) -> None:
        await call.answer(404, {"error": {"message": "unknown", "type": "x", "param": None, "code": None}})

    async def here(call: Call) -> None:
        await call.answer(200, {"id": "resp_1"})

    site.add_backend(not_here)
    site.add_backend(here)
    site.start_router()
    assert site.client.get("/v1/responses/resp_1").json() == {"id": "resp_1"}
    for behave, status in ((fail, 500), (cut, 502), (not_here, 404)):
        site.backends[1].behave = behave
        assert site.client.get("/v1/responses/resp_1").status_code == status, "who does not answer may have it"


def test_files_and_batches_are_sought_at_backends_that_drain_are_full_or_away(site: Site) -> None:
    async def not_here(call: Call) -> None:
        await call.answer(404, {"error": {"message": "unknown", "type": "x", "param": None, "code": None}})

    site.add_backend(not_here)
    keeper = site.add_backend()
    site.start_router()
    asks = [("POST", "/v1/batches"), ("POST", "/v1/batches/batch_1/cancel"), ("GET", "/v1/files/file_1")]

    def ask() -> list[int]:
        return [site.client.request(*one, content=b"{}").status_code for one in asks]

    assert ask() == [200] * 3
    site.fleet.backends[1].busy_until = time.monotonic() + 60.0
    assert ask() == [200] * 3
    site.fleet.backends[1].is_draining = True
    assert ask() == [200] * 3
    keeper.ready = 503
    site.wait_for(lambda: not site.fleet.backends[1].is_ready)
    assert ask() == [503] * 3
    assert f"{keeper.url}, which may, is down now" in site.client.get("/v1/files/file_1").json()["error"]["message"]
    site.run(remove_backend(site, keeper.url))
    assert ask() == [404] * 3


def test_an_answer_to_no_question_is_nobody_s(site: Site) -> None:
    async def answer_twice(call: Call) -> None:
        await say_name(call)
        await call.answer(200, {"prompt": "for nobody"})

    site.add_backend(answer_twice)
    site.start_router()
    for number in range(20):
        assert site.ask(f"{number}").json()["prompt"] == f"{number}"


@pytest.mark.parametrize("body", [b"", b"[", b"[1]", b'{"model": 5}', b'{"messages": "\xff"}'])
def test_bodies_are_the_backends_to_judge(site: Site, body: bytes) -> None:
    backend = site.add_backend(refuse)
    site.start_router()
    assert site.client.post("/v1/chat/completions", content=body).status_code == 400
    assert backend.calls[0].body == body


def test_a_large_body_is_refused(site: Site) -> None:
    backend = site.add_backend()
    site.start_router(ServerConfig(max_request_bytes=1000, disable_access_log=True))
    assert site.ask("x" * 2000).status_code == 413
    assert not backend.calls


def test_pages_of_allowed_origins_read_answers_also_where_a_json_list_names_them(site: Site) -> None:
    site.add_backend()
    site.start_router(ServerConfig(allowed_origins=('["https://chat.example.org"]',), disable_access_log=True))
    answer = site.client.get("/health", headers={"Origin": "https://chat.example.org"})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    other = site.client.get("/health", headers={"Origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in other.headers
