"""Backends that are found while the router runs."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from shardline.config.router import RouterConfig
from shardline.router import discovery
from shardline.router.discovery import endpoints
from tests.router.backends import Backend, Call, Site
from tests.server.test_tls import write_certificate


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


def pod(name: str, backend: Backend, **conditions: bool) -> dict[str, Any]:
    """The EndpointSlice of one pod."""
    return {
        "metadata": {"name": name},
        "ports": [{"name": "http", "port": port_of(backend)}],
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": conditions}],
    }


class Kubernetes:
    """An API server: slices, their history, and what it was asked. Its methods belong to the site's loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._version = 7
        self._slices: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._forgotten = 0
        """The versions up to this one are no longer known."""
        self._news = asyncio.Condition()
        self._end = ""
        """How the watches end next: ended, cut, gone or nonsense."""
        self.lists: list[Any] = []
        self.watches: list[dict[str, list[str]]] = []
        """What lists and watches asked for."""

    def change(self, kind: str, item: dict[str, Any]) -> None:
        """An event; BOOKMARK changes nothing."""
        self._site.run(self._act(kind, item))

    def end_watch(self, how: str) -> None:
        """End the watch that is under way, and wait until another one, or a list, has come."""
        asked = len(self.lists) + len(self.watches)
        self._site.run(self._act("", {}, how))
        self._site.wait_for(lambda: len(self.lists) + len(self.watches) > asked)

    def forget(self, item: dict[str, Any]) -> None:
        """A slice changes, the watch ends before it says so, and others from there are refused: etcd has compacted."""

        async def act() -> None:
            async with self._news:
                self._version += 1
                self._forgotten = self._version
                self._slices[item["metadata"]["name"]] = item
                self._end = "ended"
                self._news.notify_all()

        self._site.run(act())

    async def _act(self, kind: str, item: dict[str, Any], how: str = "") -> None:
        async with self._news:
            self._end = how
            if kind:
                self._version += 1
                item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
                self._history.append((self._version, kind, item))
                if kind == "DELETED":
                    del self._slices[item["metadata"]["name"]]
                elif kind != "BOOKMARK":
                    self._slices[item["metadata"]["name"]] = item
            self._news.notify_all()

    async def answer(self, call: Call) -> None:
        """Answer a list or a watch."""
        parts = urlsplit(call.path)
        query = parse_qs(parts.query)
        assert parts.path == "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices"
        assert query["labelSelector"] == ["kubernetes.io/service-name=shardline"]
        assert call.headers["authorization"] == "Bearer secret"
        if "watch" not in query:
            self.lists.append(query)
            stands = {"resourceVersion": str(self._version)}
            await call.answer(200, {"metadata": stands, "items": list(self._slices.values())})
            return
        self.watches.append(query)
        seen = int(query["resourceVersion"][0])
        if seen < self._forgotten:
            await call.answer(410, {"code": 410})
            return
        await call.begin_stream()
        self._end = ""
        while not self._end:
            for version, kind, item in self._history:
                if version > seen:
                    await self._say(call, {"type": kind, "object": item})
                    seen = version
            async with self._news:
                if not self._end and self._version == seen:
                    await self._news.wait()
        if self._end == "gone":
            await self._say(call, {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}})
        elif self._end == "nonsense":
            await self._say(call, {"type": "ADDED", "object": None})
        elif self._end == "cut":
            call.cut()
            return
        await call.send(b"0\r\n\r\n")

    @staticmethod
    async def _say(call: Call, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        for part in (line[:9], line[9:]):  # an event may come in pieces
            await call.send(b"%x\r\n%s\r\n" % (len(part), part))


@pytest.fixture
def kubernetes(
    request: pytest.FixtureRequest, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Kubernetes:
    """An API server, with TLS if the parameter says so, and the credentials for it in `tmp_path`."""
    monkeypatch.setattr(discovery, "_SECONDS", 0.02)
    tls = None
    if getattr(request, "param", "") == "tls":
        config = write_certificate(tmp_path)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(str(config.ssl_certfile), str(config.ssl_keyfile))
        (tmp_path / "cert").rename(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("team")
    made = Kubernetes(site)
    api = Backend("api", made.answer)
    site.run(api.serve(tls=tls))
    site.backends.append(api)
    return made


def start_watched(site: Site, folder: Path) -> None:
    """A router whose backends are the pods."""
    url = site.backends[0].url
    start(site, kubernetes_service="shardline:http", kubernetes_api=url, kubernetes_credentials=str(folder))


@pytest.mark.parametrize("kubernetes", ["tls"], indirect=True)
def test_pods_come_and_go_by_the_events_of_one_watch(site: Site, kubernetes: Kubernetes, tmp_path: Path) -> None:
    first, second = site.add_backend(), site.add_backend()
    kubernetes.change("ADDED", pod("a", first, ready=True))
    start_watched(site, tmp_path)
    site.wait_for(lambda: urls(site) == {first.url})
    site.wait_for(lambda: len(kubernetes.watches) == 1)
    assert (kubernetes.watches[0]["watch"], kubernetes.watches[0]["resourceVersion"]) == (["1"], ["8"])
    kubernetes.change("ADDED", pod("b", second, ready=False))
    kubernetes.change("MODIFIED", pod("b", second, ready=True))
    site.wait_for(lambda: urls(site) == {first.url, second.url})
    kubernetes.change("MODIFIED", pod("a", first, ready=True, serving=True, terminating=True))
    site.wait_for(lambda: urls(site) == {second.url})
    site.wait_for(lambda: site.fleet.backends[0].is_ready)
    assert site.ask().status_code == 200
    assert not first.calls, "a pod that terminates gets nothing more"
    kubernetes.change("DELETED", pod("a", first))
    kubernetes.change("DELETED", pod("b", second))
    site.wait_for(lambda: urls(site) == set())
    assert (len(kubernetes.lists), len(kubernetes.watches)) == (1, 1)


def test_a_watch_goes_on_where_the_last_one_ended(site: Site, kubernetes: Kubernetes, tmp_path: Path) -> None:
    first, second = site.add_backend(), site.add_backend()
    kubernetes.change("ADDED", pod("a", first))
    start_watched(site, tmp_path)
    site.wait_for(lambda: len(kubernetes.watches) == 1)
    kubernetes.change("BOOKMARK", {"metadata": {}})
    kubernetes.end_watch("ended")
    assert kubernetes.watches[1]["resourceVersion"] == ["9"]
    kubernetes.change("ADDED", pod("b", second))
    site.wait_for(lambda: urls(site) == {first.url, second.url})
    assert len(kubernetes.lists) == 1


def test_a_router_outside_of_a_pod_names_the_file_that_is_not_there(
    site: Site, kubernetes: Kubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"kubernetes_api": "https://127.0.0.1:1", "kubernetes_credentials": str(tmp_path / "none")}
    start(site, kubernetes_service="team/shardline", **config)
    site.wait_for(lambda: f"there is no {tmp_path}/none/ca.crt: outside of a pod" in caplog.text)


@pytest.mark.parametrize("how", ["gone", "cut", "nonsense"])
def test_all_is_listed_again_when_a_watch_cannot_go_on(
    site: Site, kubernetes: Kubernetes, tmp_path: Path, how: str
) -> None:
    first, second = site.add_backend(), site.add_backend()
    kubernetes.change("ADDED", pod("a", first))
    start_watched(site, tmp_path)
    site.wait_for(lambda: len(kubernetes.watches) == 1)
    kubernetes.end_watch(how)
    site.wait_for(lambda: len(kubernetes.watches) == 2)
    kubernetes.change("MODIFIED", pod("a", second))
    site.wait_for(lambda: urls(site) == {second.url})
    assert len(kubernetes.lists) == 2


def test_a_watch_from_what_was_forgotten_becomes_a_list(site: Site, kubernetes: Kubernetes, tmp_path: Path) -> None:
    first, second = site.add_backend(), site.add_backend()
    kubernetes.change("ADDED", pod("a", first))
    start_watched(site, tmp_path)
    site.wait_for(lambda: len(kubernetes.watches) == 1)
    kubernetes.forget(pod("a", second))
    site.wait_for(lambda: urls(site) == {second.url})
    assert len(kubernetes.lists) == 2


def test_endpoints_are_those_that_take_requests() -> None:
    slices: list[dict[str, Any]] = [
        {"ports": [{"name": "web", "port": 8000}, {"name": "metrics", "port": 9}],
         "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["fd00::1"], "conditions": {"ready": True}}]},
        {"ports": [{"name": "other", "port": 1}], "endpoints": [{"addresses": ["10.0.0.3"]}]},
        {"ports": None, "endpoints": None},
    ]  # fmt: skip
    assert [one.url for one in endpoints(slices, "web")] == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    assert [one.url for one in endpoints(slices, "8000")] == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    assert len(endpoints(slices, "")) == 3
    slices[0]["ports"] = [{"port": 80}]
    assert [one.url for one in endpoints(slices, "80")] == ["http://10.0.0.1", "http://[fd00::1]"]


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
