"""Who may look at a router and change it, and what becomes of backends that come and go."""

from __future__ import annotations

import httpx
import pytest

from shardline.config.router import RouterConfig
from shardline.config.server import ServerConfig
from shardline.router.app import create_app
from shardline.server.keys import ApiKeys
from shardline.server.middleware import InFlight
from tests.router.backends import (
    Backend,
    Site,
    remove_backend,
    stream_words,
)


def test_without_a_key_only_this_machine_administers(site: Site) -> None:
    site.start_router()
    server = ServerConfig(disable_access_log=True)
    app = create_app(site.fleet, RouterConfig(), server, ApiKeys(server), InFlight())

    async def statuses(host: str) -> list[int]:
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            drain = await client.post("/router/drain", json={"url": "http://a"})
            return [(await client.get("/router/status")).status_code, drain.status_code]

    assert site.run(statuses("192.0.2.1")) == [401, 401]
    assert site.run(statuses("127.0.0.1")) == [200, 400]


def test_backends_come_go_and_drain(site: Site) -> None:
    first, second = site.add_backend(), site.add_backend(ready=503)
    site.start_router(policy="round_robin")
    site.fleet.backends[0].is_draining = True
    message = site.ask().json()["error"]["message"]
    assert f"({first.url}: draining; {second.url}: GET /ready says 503)" in message
    site.fleet.backends[0].is_draining = False
    assert [site.ask().status_code for _ in range(3)] == [200] * 3
    assert not second.calls
    second.ready = 200
    site.wait_for(lambda: site.fleet.backends[1].is_ready)
    answer = site.client.post("/router/drain", json={"url": first.url})
    assert [backend["state"] for backend in answer.json()["backends"]] == ["draining", "ready"]
    first.calls.clear()
    assert [site.ask().status_code for _ in range(3)] == [200] * 3
    assert (len(first.calls), len(second.calls)) == (0, 3)
    site.client.post("/router/remove", json={"url": first.url})
    third = Backend("b2", stream_words)
    site.backends.append(third)
    site.run(third.serve())
    assert site.client.post("/router/add", json={"url": third.url}).status_code == 200
    site.wait_for(lambda: site.fleet.backends[1].is_ready)
    site.ask()
    site.ask()
    assert len(third.calls) == 1
    for url, message in ((third.url, "is there already"), ("ftp://x", "is no URL of a server")):
        answer = site.client.post("/router/add", json={"url": url})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    assert site.client.post("/router/drain", json={"url": "http://nowhere"}).status_code == 400
    assert site.client.post("/router/explode", json={"url": third.url}).status_code == 404
    assert site.client.post("/router/drain", content=b"[").status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("POST", "/v1/models", 405, "method_not_allowed"), ("GET", "/router/no/such", 404, "unknown_url")],
)
def test_mistakes_at_the_router_s_own_paths_are_told(
    site: Site, method: str, path: str, status: int, code: str
) -> None:
    site.start_router()
    answer = site.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert path in answer.json()["error"]["message"]
    assert ("allow" in answer.headers) == (status == 405)


def test_keys_guard_the_router_and_open_its_backends(site: Site) -> None:
    backend = site.add_backend()
    server = ServerConfig(api_key=("mine",), admin_api_key="root", disable_access_log=True)
    site.start_router(server, backend_api_key="theirs")
    assert site.ask().status_code == 401
    site.client.headers["Authorization"] = "Bearer mine"
    assert site.ask().status_code == 200
    assert backend.calls[0].headers["authorization"] == "Bearer theirs"
    assert site.client.get("/router/status").status_code == 401
    site.client.headers["Authorization"] = "Bearer root"
    assert site.client.get("/router/status").json()["backends"][0]["state"] == "ready"


def test_metrics_forget_backends_that_are_gone(site: Site) -> None:
    gone = site.add_backend().url
    site.start_router()
    assert site.ask().status_code == 200
    assert f'requests_total{{backend="{gone}",outcome="ok"}} 1.0' in site.client.get("/metrics").text
    site.run(remove_backend(site, gone))
    assert gone not in site.client.get("/metrics").text
