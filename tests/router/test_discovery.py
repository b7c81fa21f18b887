"""Backends that are found while the router runs."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from shardline.config.router import RouterConfig
from shardline.router import discovery
from shardline.router.discovery import endpoints
from tests.router.backends import Backend, Call, Site, open_site
from tests.server.test_tls import write_certificate


@pytest.fixture
def site() -> Iterator[Site]:
    with open_site() as made:
        yield made


def port_of(backend: Backend) -> int:
    port = urlsplit(backend.url).port
    assert port is not None
    return port


def urls(site: Site) -> set[str]:
    return {backend.url for backend in site.fleet.backends}


def start(site: Site, *flags: Backend, **options: Any) -> None:
    """A router whose backends are those of flags only."""
    backends, site.backends = site.backends, list(flags)
    site.start_router(**options)
    site.backends = backends


def test_a_file_is_followed(site: Site, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(discovery, "_SECONDS", 0.02)
    flag, first, second = (site.add_backend() for _ in range(3))
    file = tmp_path / "backends"
    file.write_text(f"{first.url}  # comes first\n")
    start(site, flag, backends_file=str(file))
    site.wait_for(lambda: urls(site) == {flag.url, first.url})

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", file)

    write(f"{second.url}\n{flag.url}\n")
    site.wait_for(lambda: urls(site) == {flag.url, second.url})
    write("nonsense\n")
    site.wait_for(lambda: "nonsense" in caplog.text)
    file.unlink()
    site.wait_for(lambda: all(backend.is_ready for backend in site.fleet.backends))
    assert urls(site) == {flag.url, second.url}, "a file that cannot be read changes nothing"
    write("")
    site.wait_for(lambda: urls(site) == {flag.url})
    assert site.ask().status_code == 200


def test_each_address_of_a_name_is_a_backend(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(discovery, "_DNS_SECONDS", 0.02)
    backend = site.add_backend()
    start(site, backend_dns=(f"http://localhost:{port_of(backend)}",))
    site.wait_for(lambda: backend.url in urls(site))
    site.wait_for(lambda: any(one.is_ready for one in site.fleet.backends))
    assert site.ask().status_code == 200


def pod(port: int, **conditions: bool) -> dict[str, Any]:
    return {
        "ports": [{"name": "http", "port": port}],
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": conditions}],
    }


def test_pods_of_a_service_come_and_go(site: Site, tmp_path) -> None:
    first, second = site.add_backend(), site.add_backend()
    items = [pod(port_of(first), ready=True), pod(port_of(second), ready=False)]
    changed, asked = asyncio.Event(), []

    async def kubernetes(call: Call) -> None:
        parts = urlsplit(call.path)
        asked.append((parts.path, parse_qs(parts.query), call.headers["authorization"]))
        if "watch" not in parse_qs(parts.query):
            await call.answer(200, {"metadata": {"resourceVersion": "7"}, "items": items})
            return
        await call.begin_stream()
        await changed.wait()
        changed.clear()
        await call.send_event(json.dumps({"type": "MODIFIED"}))
        call.cut()

    config = write_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(str(config.ssl_certfile), str(config.ssl_keyfile))
    (tmp_path / "cert").rename(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("team")
    api = Backend("api", kubernetes)
    site.run(api.serve(tls=tls))
    start(
        site,
        kubernetes_service="shardline:http",
        kubernetes_api=api.url,
        kubernetes_credentials=str(tmp_path),
    )
    site.backends.append(api)
    site.wait_for(lambda: urls(site) == {first.url})
    site.wait_for(lambda: len(asked) == 2)
    path, query, key = asked[1]
    assert path == "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices"
    assert query["labelSelector"] == ["kubernetes.io/service-name=shardline"]
    assert (query["watch"], query["resourceVersion"], key) == (["1"], ["7"], "Bearer secret")

    async def change(*now: dict[str, Any]) -> None:
        items[:] = now
        changed.set()

    site.run(change(pod(port_of(first), ready=True, serving=True, terminating=True), pod(port_of(second), ready=True)))
    site.wait_for(lambda: urls(site) == {second.url})
    site.wait_for(lambda: site.fleet.backends[0].is_ready)
    assert site.ask().status_code == 200
    assert not first.calls, "a pod that terminates gets nothing more"


def test_endpoints_are_those_that_take_requests() -> None:
    slices = {
        "items": [
            {"ports": [{"name": "web", "port": 8000}, {"name": "metrics", "port": 9}],
             "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["fd00::1"], "conditions": {"ready": True}}]},
            {"ports": [{"name": "other", "port": 1}], "endpoints": [{"addresses": ["10.0.0.3"]}]},
            {"ports": None, "endpoints": None},
        ]
    }  # fmt: skip
    assert [one.url for one in endpoints(slices, "web")] == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    assert [one.url for one in endpoints(slices, "8000")] == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    assert len(endpoints(slices, "")) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"backend_dns": ("https://a",)},
        {"backend_dns": "http://a"},
        {"backends_file": "/none/such"},
        {"kubernetes_service": "a/b:"},
        {"kubernetes_service": "a/"},
        {"kv_index_memory": "much"},
        {"kv_events_port": 0},
    ],
)
def test_sources_that_cannot_be_are_refused(options) -> None:
    with pytest.raises(ValueError, match=r".+"):
        RouterConfig(**options)
