"""A server with scripted answers, in a thread, so that the client's figures can be compared with known times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

CLOSE = "close"
Script = list[tuple[float, bytes | str]]
"""Pauses in seconds, each followed by bytes to send, or CLOSE."""


@dataclass
class StubServer:
    """Answers request `index` with `answer(index, path, body)`; `arrivals` are the times when requests came."""

    answer: Callable[[int, str, Any], Script]
    url: str = ""
    arrivals: list[float] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    metrics: list[str] = field(default_factory=list)
    """The pages that /metrics shows in turn. Requests for them are not counted; 404: there are none."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:")), 0)
                body = await reader.readexactly(length)
                if head.startswith("GET /metrics "):
                    page, status = (self.metrics.pop(0), "200 OK") if self.metrics else ("", "404 Not Found")
                    writer.write(
                        b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(page), page.encode())
                    )
                    continue
                index = len(self.arrivals)
                self.arrivals.append(time.perf_counter())
                self.headers.append(head)
                self.bodies.append(json.loads(body) if body else None)
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                path = head.split(" ")[1]
                for pause, piece in self.answer(index, path, self.bodies[-1]):
                    if pause:
                        await asyncio.sleep(pause)
                    if isinstance(piece, str):
                        self.running -= 1
                        writer.close()
                        return
                    writer.write(piece)
                self.running -= 1
        writer.close()


def whole(body: Any, status: str = "200 OK") -> bytes:
    """A whole answer."""
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(data), data)


def event(body: Any) -> bytes:
    """A chunk with one server-sent event."""
    data = b"data: " + (body.encode() if isinstance(body, str) else json.dumps(body).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def stream(tokens: int, first: float = 0.0, gap: float = 0.0, *, chat: bool = False) -> Script:
    """A stream of `tokens` tokens: the first after `first` seconds, the others `gap` apart, then the usage."""
    choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
    token = event({"choices": [{"index": 0, **choice}]})
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
    pieces: Script = [(0.0, HEAD), (first, token), *[(gap, token)] * (tokens - 1)]
    return [*pieces, (0.0, usage + event("[DONE]") + LAST)]


@contextlib.contextmanager
def stub_server(answer: Callable[[int, str, Any], Script]) -> Iterator[StubServer]:
    """The server, for the duration of the block."""
    server = StubServer(answer)
    up, stop = threading.Event(), []

    async def main() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        up.set()
        await ended.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert up.wait(10)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(10)
