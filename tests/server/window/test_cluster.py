"""GET /cluster over a real connection, and its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from typing import Any

import httpx
import pytest

from shardline.config.server import ServerConfig
from shardline.server.errors import ApiError
from shardline.server.sse import CUT
from shardline.server.window import feed
from shardline.server.window.feed import ClusterStream, Window
from tests.server.conftest import Running, serve, wait_until
from tests.server.fake_engine import fake_llm

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture(autouse=True)
def no_looks_but_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "SAMPLE_SECONDS", 1e6)


@pytest.fixture
def window(shared: Running) -> Window:
    return shared.service.window


def wait_left(running: Running) -> None:
    """Wait until the server knows that nobody looks: what it sends is refused."""

    def is_alone() -> bool:
        running.in_loop(running.service.window.sample)
        return running.service.window._num_viewers == 0

    wait_until(is_alone, 30.0)


def events(answer: httpx.Response) -> Iterator[dict[str, object]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_what_it_says(shared: Running, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": None, "prompt": "a", "max_tokens": 3})
    assert answer.status_code == 200
    shared.in_loop(shared.service.window.sample)
    body = http.get("/cluster").json()
    assert body["state"] == "ready"
    assert body["model"] == shared.service.model_names[0]
    assert [replica["alive"] for replica in body["replicas"]] == [True]
    assert body["first_token"]["count"] == 1
    assert body["last_request"]["choices"][0]["num_generation_tokens"] == 3
    assert "id" not in body["last_request"]
    assert len(body["history"]["times"]) >= 2
    assert http.get("/cluster?history=false").json()["history"] is None


def test_a_stream_has_the_history_once(shared: Running, window: Window) -> None:
    with shared.http() as http, http.stream("GET", "/cluster", headers=STREAM) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen = events(answer)
        assert next(seen)["history"] is not None
        shared.in_loop(window.sample)
        assert next(seen)["history"] is None


def test_viewers_share_one_look(shared: Running, window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    look = window._look

    def note(history: bool) -> object:
        looks.append(history)
        return look(history=history)

    monkeypatch.setattr(window, "_look", note)
    with (
        shared.http() as http,
        http.stream("GET", "/cluster", headers=STREAM) as one,
        http.stream("GET", "/cluster", headers=STREAM) as two,
    ):
        first, second = events(one), events(two)
        assert next(first)["history"] == next(second)["history"]
        looks.clear()
        shared.in_loop(window.sample)
        assert next(first) == next(second)
        shared.in_loop(window.sample)
        next(first), next(second)
        assert looks == [False, False]
    wait_left(shared)
    looks.clear()
    for _ in range(5):
        shared.in_loop(window.sample)
    assert looks == []


def test_too_many_viewers_are_asked_to_come_back(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)
    with shared.http() as http:
        with http.stream("GET", "/cluster", headers=STREAM) as first:
            next(events(first))
            refused = http.get("/cluster", headers=STREAM)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
            assert http.get("/cluster").status_code == 200
        wait_left(shared)
        with http.stream("GET", "/cluster", headers=STREAM) as again:
            assert again.status_code == 200


def test_it_needs_the_key() -> None:
    with serve(ServerConfig(port=0, api_key=("secret",))) as running, running.http() as http:
        assert http.get("/cluster").status_code == 401
        assert http.get("/cluster", headers={"Authorization": "Bearer secret"}).status_code == 200


class Viewer:
    """A connection that takes what the test lets it take."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.taken: list[bytes] = []
        self.left = asyncio.Event()
        self.cut = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await self.takes.wait()
            self.taken.append(message["body"])

    async def receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    def abort(self) -> None:
        self.cut = True
        self.left.set()

    async def watch(self, window: Window) -> None:
        await ClusterStream(window)({"type": "http", CUT: self.abort}, self.receive, self.send)


def test_a_slow_viewer_gets_the_latest_and_nothing_piles_up() -> None:
    async def main() -> None:
        window, viewer = make_window(), Viewer()
        watching = asyncio.create_task(viewer.watch(window))
        for _ in range(50):
            await asyncio.sleep(0)
            window.sample()
        viewer.takes.set()
        await asyncio.sleep(0.01)
        assert len(viewer.taken) == 2  # the one that it held up, and the latest
        window.sample()
        await asyncio.sleep(0.01)
        assert len(viewer.taken) == 3
        viewer.left.set()
        await watching

    asyncio.run(main())


def test_a_viewer_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "STUCK_SECONDS", 0.01)
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)

    async def main() -> None:
        window, viewer = make_window(), Viewer()
        await viewer.watch(window)
        assert viewer.cut
        with window.viewing(), pytest.raises(ApiError), window.viewing():  # its place is free again
            pass

    asyncio.run(main())


def test_streams_end_with_the_server() -> None:
    async def main() -> None:
        window, viewer = make_window(), Viewer()
        viewer.takes.set()
        sampling = asyncio.create_task(window.run())
        watching = asyncio.create_task(viewer.watch(window))
        await asyncio.sleep(0.01)
        sampling.cancel()
        await watching
        assert viewer.taken[-1] == b""

    asyncio.run(main())


def make_window() -> Window:
    from shardline.metrics.server import ServerMetrics
    from shardline.server.observer import RequestLog

    llm, _ = fake_llm()
    return Window(llm, "m", ServerMetrics("m", llm.stats).requests.first_token, RequestLog())
