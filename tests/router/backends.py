"""Backends that do what a test wants, and a router in front of them, each on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import uvloop

from shardline.config.router import RouterConfig
from shardline.config.server import ServerConfig
from shardline.router.app import create_app
from shardline.router.fleet import Fleet
from shardline.router.launch import watch_fleet
from shardline.server.keys import ApiKeys
from shardline.server.launch import bind_listener, make_http_server
from shardline.server.middleware import InFlight
from tests.server.endings import ends_at_once

T = TypeVar("T")
_PATIENCE = 60.0
"""Seconds after which a test hangs. Other programs may have the cores for long."""
Behaviour = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """A request that a backend has got, and the way to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def fields(self) -> dict[str, Any]:
        """The body as an object."""
        fields = json.loads(self.body)
        assert isinstance(fields, dict)
        return fields

    async def answer(self, status: int, fields: Any, **headers: str) -> None:
        """Send a whole answer."""
        body = json.dumps(fields).encode()
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def begin_stream(self) -> None:
        """Send the head of a stream."""
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def send_event(self, text: str) -> None:
        """Send one event of a stream."""
        data = f"data: {text}\n\n".encode()
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        """End a stream as it must end."""
        await self.send_event("[DONE]")
        await self.send(b"0\r\n\r\n")

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    def cut(self) -> None:
        """Close the connection at once."""
        self.writer.transport.abort()


@dataclass
class Backend:
    """A server whose behaviour can be changed at any time."""

    name: str
    behave: Behaviour
    models: list[str] = field(default_factory=lambda: ["m"])
    contract: str = ""
    """The numeric contract that it states."""
    ready: int = 200
    """What it says when it is asked whether it is ready."""
    calls: list[Call] = field(default_factory=list)
    left: int = 0
    """Connections that have ended before their answer."""
    num_connections: int = 0
    """That were ever made to it."""
    url: str = ""
    server: asyncio.Server | None = None

    async def serve(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """Listen."""
        self.server = await asyncio.start_server(self._connect, "127.0.0.1", port, ssl=tls)
        scheme, name = ("http", "127.0.0.1") if tls is None else ("https", "localhost")
        self.url = f"{scheme}://{name}:{self.server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer_next(reader, writer):
                pass

    async def _answer_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer the next request of a connection. False: its client has left."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lines = [line.split(": ", 1) for line in head.split("\r\n")[1:-2]]
        headers = {name.lower(): value for name, value in lines}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(method, path, headers, body, writer)
        if path in ("/ready", "/health"):
            await call.answer(self.ready, {})
            return True
        if path == "/v1/models":
            contract = {"numeric_contract": self.contract}
            await call.answer(200, {"data": [{"id": model, "object": "model", **contract} for model in self.models]})
            return True
        self.calls.append(call)
        task = asyncio.ensure_future(self.behave(call))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        has_left = not task.done()
        self.left += has_left
        for unfinished in (task, leaving):
            unfinished.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)
        return not has_left


async def say_name(call: Call) -> None:
    """Answer with what was asked."""
    await call.answer(200, {"object": "chat.completion", "prompt": call.fields.get("prompt", "")})


async def stream_words(call: Call) -> None:
    """Answer with a stream of three words."""
    await call.begin_stream()
    for word in ("one", "two", "three"):
        await call.send_event(word)
    await call.end_stream()


async def fail(call: Call) -> None:
    await call.answer(500, {"error": {"message": "broken", "type": "server_error", "param": None, "code": None}})


async def cut(call: Call) -> None:
    call.cut()


async def refuse(call: Call) -> None:
    await call.answer(400, {"error": {"message": "bad", "type": "x", "param": None, "code": None}})


async def silent(call: Call) -> None:
    """Say nothing."""
    await asyncio.sleep(60.0)


class Site:
    """Backends and a router, on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()  # as the router's own
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.backends: list[Backend] = []
        self.fleet: Fleet
        self.client = httpx.Client(timeout=_PATIENCE, verify=False)
        self._ending: list[Callable[[], None]] = []

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop of the servers."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(_PATIENCE + 5.0)

    def add_backend(self, behave: Behaviour = say_name, **fields: Any) -> Backend:
        """Start a backend."""
        backend = Backend(f"b{len(self.backends)}", behave, **fields)
        self.run(backend.serve())
        self.backends.append(backend)
        return backend

    def start_router(self, server: ServerConfig | None = None, **options: Any) -> None:
        """Start a router in front of all backends, and wait until it has looked at each."""
        config = RouterConfig(tuple(backend.url for backend in self.backends), **{"health_interval": 0.05, **options})
        self.fleet = Fleet(config)
        server = server or ServerConfig(disable_access_log=True)
        self.run(self._start(config, server))
        self.wait_for(lambda: all(backend.models for backend in self.fleet.backends if backend.is_ready))
        self.wait_for(lambda: all(b.is_ready or "not been asked" not in b.problem for b in self.fleet.backends))

    async def _start(self, config: RouterConfig, server: ServerConfig) -> None:
        listener = bind_listener("127.0.0.1", 0)
        app = create_app(self.fleet, config, server, ApiKeys(server), InFlight())
        http = make_http_server(app, server, 0)
        end_http = ends_at_once(http)
        tasks = [
            asyncio.create_task(http.serve(sockets=[listener])),
            asyncio.create_task(watch_fleet(self.fleet, config)),
        ]

        async def end() -> None:
            end_http()
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listener.close()
            self.fleet.close()

        self._ending.append(lambda: self.run(end()))
        self.client.base_url = httpx.URL(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""

        async def wait() -> None:
            async with asyncio.timeout(_PATIENCE):
                while not condition():
                    await asyncio.sleep(0.005)

        self.run(wait())

    def ask(self, prompt: str = "hi", **fields: Any) -> httpx.Response:
        """A completion."""
        return self.client.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    def close(self) -> None:
        """End everything."""
        self.client.close()
        for end in self._ending:
            end()
        self.run(self._end_backends())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_backends(self) -> None:
        for backend in self.backends:
            if backend.server is not None:
                backend.server.close()
        this = asyncio.current_task()
        while tasks := [task for task in asyncio.all_tasks() if task is not this]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.02)  # connections end, and such as were just accepted begin, in the next turns


@contextlib.contextmanager
def open_site() -> Iterator[Site]:
    """A site that is closed at the end."""
    with contextlib.closing(Site()) as site:
        yield site


async def set_event(event: asyncio.Event) -> None:
    event.set()


async def remove_backend(site: Site, url: str) -> None:
    site.fleet.remove(url)
