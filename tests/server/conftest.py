"""A real HTTP server on a free port, over a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from shardline.api.async_llm import AsyncLLM
from shardline.checkpoints.classifier import LabelConfig
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.app import create_app
from shardline.server.connections import BoundedHttpProtocol
from shardline.server.service import Service
from tests.server.endings import ends_at_once
from tests.server.fake_engine import FakeEngine, fake_llm


@dataclass
class Running:
    """A server that runs in a thread."""

    port: int
    llm: AsyncLLM
    engine: FakeEngine
    service: Service
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options: Any) -> httpx.Client:
        """A client. To read the certificates of authorities, which none needs here, would take 20 ms."""
        return httpx.Client(base_url=self.url, timeout=10, trust_env=False, verify=False, **options)

    def openai(self, key: str = "none") -> openai.OpenAI:
        transport = openai.DefaultHttpxClient(trust_env=False, timeout=10, verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=transport)

    def in_loop(self, call: Callable[[], object]) -> None:
        """Run `call` on the server's event loop, and wait for it."""
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(5)


@contextlib.contextmanager
def serve(
    config: ServerConfig | None = None,
    *,
    ready: bool = True,
    engine_config: EngineConfig | None = None,
    labels: LabelConfig | None = None,
) -> Iterator[Running]:
    """A server for the duration of the block; `ready=False`: its engine is still loading; `labels`: its model is a
    classifier with these labels, and `engine_config` says so, too."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    box: list[Running | Callable[[], None]] = []
    up = threading.Event()

    async def main() -> None:
        llm, engine = fake_llm(engine_config, labels)
        server_config = config or ServerConfig(port=0)
        app = create_app(llm, server_config)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=60,  # as the product; a client that was kept from the cores finds its connection
                root_path=server_config.root_path,
            )
        )
        if ready:
            engine.load.set()
        loading = asyncio.create_task(llm.wait_ready())
        port = listener.getsockname()[1]
        box.extend([Running(port, llm, engine, app.state.service, asyncio.get_running_loop()), ends_at_once(server)])
        if ready:
            await loading
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        up.set()
        await serving
        if app.state.batches is not None:
            await app.state.batches.close()
        await llm.close()
        await asyncio.gather(loading, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    while not up.wait(1.0):
        assert thread.is_alive(), "it has failed"
    running, end = box
    assert isinstance(running, Running)
    assert not isinstance(end, Running)
    try:
        yield running
    finally:
        running.engine.load.set()
        running.loop.call_soon_threadsafe(end)
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server for all tests of a module that do not change its state."""
    with serve() as running:
        yield running


@pytest.fixture
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with shared.openai() as client:
        yield client


@pytest.fixture
def http(shared: Running) -> Iterator[httpx.Client]:
    with shared.http() as http:
        yield http


def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `holds()` is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)
