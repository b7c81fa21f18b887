"""Responses that continue others, are shown, or are ended: the backend that keeps them gets these requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shardline.config.router import RouterConfig
from shardline.config.server import ServerConfig
from shardline.router import kept_responses
from shardline.router.fleet import Fleet
from shardline.router.kept_responses import PATH, KeptResponses, response_of
from tests.router.backends import Backend, Call, Site, open_site
from tests.server.conftest import serve
from tests.server.test_tools import TEMPLATE


class Store:
    """What a backend does that keeps responses."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: list[str] = []
        self.is_full = False

    async def __call__(self, call: Call) -> None:
        parts = call.path.removeprefix(PATH).strip("/").split("/")
        if self.is_full:
            await call.answer(429, {"error": {"message": "full"}}, retry_after="1")
        elif parts[0]:
            await call.answer(200 if parts[0] in self.kept else 404, {"by": self.name, "asked": parts})
        elif (previous := call.fields.get("previous_response_id")) and previous not in self.kept:
            await call.answer(404, {"error": {"code": "previous_response_not_found"}})
        else:
            await self._create(call)

    async def _create(self, call: Call) -> None:
        self.kept.append(f"resp_{self.name}-{len(self.kept)}")
        response = {
            "id": self.kept[-1],
            "by": self.name,
            "previous_response_id": call.fields.get("previous_response_id"),
        }
        if not call.fields.get("stream"):
            await call.answer(200, response)
            return
        await call.begin_stream()
        await call.send(b"10\r\n: still working\n\r\n")
        await call.send(b"1\r\n\n\r\n")
        await call.send_event(json.dumps({"type": "response.created", "response": response}))
        if call.fields["input"] == "cut":
            call.cut()
            return
        await call.send(b"0\r\n\r\n")


def start(site: Site, **options: Any) -> list[Store]:
    """A router before two backends that keep responses."""
    stores = [Store(name) for name in "ab"]
    for store in stores:
        site.add_backend(store)
    site.start_router(policy="round_robin", health_interval=0.05, **options)
    return stores


def create(site: Site, previous: str | None = None, **fields: Any) -> httpx.Response:
    """A response, which may continue another one."""
    if previous is not None:
        fields["previous_response_id"] = previous
    return site.client.post(PATH, json={"model": "m", "input": "hi", **fields})


def id_in(answer: httpx.Response) -> str:
    """The id of a response, or of the one of a stream."""
    assert answer.status_code == 200, answer.text
    text = answer.text
    data = json.loads(text.partition("data: ")[2]) if "data: " in text else {"response": answer.json()}
    found = data["response"]["id"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_stays_where_it_began(site: Site, stream: bool) -> None:
    start(site)
    lines = [id_in(create(site, stream=stream)) for _ in range(2)]
    assert {one[5] for one in lines} == {"a", "b"}, "the policy spreads them"
    for _ in range(3):
        lines = [id_in(create(site, one, stream=stream)) for one in reversed(lines)]
    assert {one[5] for one in lines} == {"a", "b"}


def test_what_is_asked_of_a_response_goes_to_its_backend(site: Site) -> None:
    start(site)
    first, second = (id_in(create(site, background=True)) for _ in range(2))
    for response_id in (second, first):
        calls = [len(backend.calls) for backend in site.backends]
        for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            said = site.client.request(method, f"{PATH}/{response_id}{end}")
            assert (said.status_code, said.json()["by"]) == (200, response_id[5])
        asked = [len(backend.calls) - before for backend, before in zip(site.backends, calls, strict=True)]
        assert sorted(asked) == [0, 4]


def test_what_a_router_has_not_seen_is_sought(site: Site) -> None:
    stores = start(site)
    stores[1].kept.append("resp_old")
    for _ in range(2):
        assert create(site, "resp_old").json()["by"] == "b"
    assert site.client.post(f"{PATH}/resp_old/cancel").json()["by"] == "b"
    nobody = create(site, "resp_nobody")
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert site.client.get(f"{PATH}/resp_nobody").status_code == 404


def test_a_backend_that_is_full_is_waited_for(site: Site) -> None:
    stores = start(site, queue_timeout=0.3)
    first = create(site).json()
    holder = next(store for store in stores if store.name == first["by"])
    holder.is_full = True
    calls = [len(backend.calls) for backend in site.backends]
    assert create(site, first["id"]).status_code == 429
    asked = sorted(len(backend.calls) - before for backend, before in zip(site.backends, calls, strict=True))
    assert asked in ([0, 1], [0, 2]), "it waits, though the other backend has room"
    holder.is_full = False
    for backend in site.fleet.backends:
        backend.busy_until = 0.0
    assert create(site, first["id"]).json()["by"] == first["by"]


def test_when_its_backend_is_gone_one_error_says_so(site: Site) -> None:
    start(site)
    first, second = (create(site).json() for _ in range(2))
    holder = next(backend for backend in site.backends if backend.behave.name == first["by"])  # type: ignore[attr-defined]
    holder.ready = 503
    site.wait_for(lambda: not site.fleet.find(holder.url).is_ready)
    calls = [len(backend.calls) for backend in site.backends]
    for said in (create(site, first["id"]), site.client.get(f"{PATH}/{first['id']}")):
        error = said.json()["error"]
        assert (said.status_code, error["code"], said.headers["retry-after"]) == (503, "no_backend", "1")
        assert holder.url in error["message"]
        assert first["id"] in error["message"]
    assert create(site, second["id"]).status_code == 200, "others go on"
    site.client.post("/router/remove", json={"url": holder.url}).raise_for_status()
    said = create(site, first["id"])
    error = said.json()["error"]
    assert (said.status_code, error["type"]) == (404, "invalid_request_error")
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "input" in error["message"]
    error = site.client.post(f"{PATH}/{first['id']}/cancel").json()["error"]
    assert (error["param"], error["code"]) == ("response_id", "response_not_found")
    asked = [len(backend.calls) - before for backend, before in zip(site.backends, calls, strict=True)]
    assert sorted(asked) == [0, 1]


def test_a_backend_that_drains_shows_and_ends_responses_but_continues_none(site: Site) -> None:
    start(site)
    first = create(site).json()
    url = next(backend.url for backend in site.backends if backend.behave.name == first["by"])  # type: ignore[attr-defined]
    site.client.post("/router/drain", json={"url": url}).raise_for_status()
    assert site.client.post(f"{PATH}/{first['id']}/cancel").json()["by"] == first["by"]
    said = create(site, first["id"])
    assert (said.status_code, "draining" in said.json()["error"]["message"]) == (503, True)


def test_a_stream_that_continues_another_ends_with_an_error_when_its_backend_dies(site: Site) -> None:
    start(site)
    first = create(site).json()
    calls = sum(len(backend.calls) for backend in site.backends)
    said = create(site, first["id"], stream=True, input="cut")
    assert said.text.endswith("\n\n")
    error = json.loads(said.text.rpartition("data: ")[2])
    assert (error["type"], error["code"]) == ("error", "backend_failed")
    assert sum(len(backend.calls) for backend in site.backends) == calls + 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_responses, "_MOST", 3)
    fleet = Fleet(RouterConfig(("http://a:1",)))
    kept, [backend] = KeptResponses(fleet), fleet.backends
    backend.is_ready = True
    for number in range(4):
        kept.note(f"resp_{number}", backend)
        assert kept.find("resp_0") is backend, "it was used just now"
    assert [kept.find(f"resp_{number}") for number in range(4)] == [backend, None, backend, backend]
    assert not kept.learn(b'{"previous_response_id": "resp_9"}', backend)
    assert not kept.learn(b'{"text": "{\\"id\\": \\"resp_9\\"}"}', backend)
    assert not kept.learn(b" " * 5000 + b'"id":"resp_9"', backend)
    assert kept.find("resp_9") is None


@pytest.mark.parametrize(
    ("method", "path", "response_id"),
    [
        ("GET", "/v1/responses/resp_1", "resp_1"),
        ("DELETE", "/v1/responses/resp_1", "resp_1"),
        ("GET", "/v1/responses/resp_1/input_items", "resp_1"),
        ("POST", "/v1/responses/resp_1/cancel", "resp_1"),
        ("POST", "/v1/responses/render", ""),
        ("POST", "/v1/responses", ""),
        ("GET", "/v1/files/resp_1", ""),
        ("GET", "/v1/responses/resp_1/other", ""),
    ],
)
def test_which_requests_are_about_a_response(method: str, path: str, response_id: str) -> None:
    assert response_of(method, path) == response_id


def test_real_servers_continue_show_and_end_their_responses() -> None:
    config = ServerConfig(chat_template=TEMPLATE, served_model_name=("m",))
    with serve(config) as one, serve(config) as two, open_site() as site:
        for running in (one, two):
            site.backends.append(Backend("server", Store("x"), url=f"http://127.0.0.1:{running.port}"))
        site.start_router(policy="round_robin")
        began = [create(site).json()["id"] for _ in range(2)]
        with site.client.stream("POST", PATH, json={"model": "m", "input": "hi", "stream": True}) as stream:
            events = stream.read().decode().split("\n\n")
        began.append(json.loads(events[0].partition("data: ")[2])["response"]["id"])
        began.append(create(site, background=True).json()["id"])
        for response_id in began:
            url = f"{PATH}/{response_id}"
            assert site.client.get(url).json()["id"] == response_id
            assert len(site.client.get(f"{url}/input_items").json()["data"]) == 1
        for response_id in began[:3]:
            again = create(site, response_id)
            assert again.status_code == 200, again.text
            items = site.client.get(f"{PATH}/{again.json()['id']}/input_items").json()["data"]
            assert len(items) == 3, "two turns"
        assert site.client.post(f"{PATH}/{began[3]}/cancel").status_code == 200
        assert site.client.delete(f"{PATH}/{began[0]}").json()["deleted"]
        assert site.client.get(f"{PATH}/{began[0]}").status_code == 404
