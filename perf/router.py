"""What a door adds to a request: `python perf/router.py`, beside NGINX, HAProxy and vllm-router where they are.

Mocks and client share one core, the door has another one. The mocks answer at once, with a stream of 8 events. Each
door is measured in several rounds, in turns, and the table has the medians with the least and the most:

* added time to first token: that through the door, minus that straight to a mock, at the same rate;
* processor time of the door for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_TICKS = os.sysconf("SC_CLK_TCK")
_EVENTS = 8
_EVENT = b'data: {"object": "text_completion", "choices": [{"index": 0, "text": " word", "finish_reason": null}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM = _HEAD + b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT) * _EVENTS + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


class Mock(asyncio.Protocol):
    """A server that answers every request at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(self._data) < end + 4 + length:
                return
            self._data = self._data[end + 4 + length :]
            body = _MODELS if b" /v1/models" in head else b"{}"
            self._transport.write(_STREAM if head.startswith(b"post") else _JSON % (len(body), body))


class Client(asyncio.Protocol):
    """One connection that asks, and notes when the first event and the end of the answer come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ended: asyncio.Future[float] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the door takes another request on this connection."""
        return b"connection: close" not in self._seen.partition(b"\r\n\r\n")[0].lower()

    async def ask(self, request: bytes) -> float:
        """Seconds until the first event."""
        self._seen, self._first, self._began = b"", 0.0, time.perf_counter()
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._ended

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if not self._first and b"data:" in self._seen:
            self._first = time.perf_counter() - self._began
        if self._seen.endswith(b"0\r\n\r\n") and self._ended is not None and not self._ended.done():
            if self._seen.startswith(b"HTTP/1.1 200") and self._seen.count(b"data: {") == _EVENTS:
                self._ended.set_result(self._first)
            else:
                self._ended.set_exception(ValueError(f"not the stream of a mock: {self._seen[:500]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"the door has closed the connection: {self._seen[-300:]!r}"))


async def load(url: str, rate: float, count: int, prompt_bytes: int) -> list[float]:
    """Send requests at a rate, each on a free connection; returns the seconds to their first events."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    free: list[Client] = []
    found: list[float] = []

    async def one(number: int) -> None:
        prompt = f"{number} " + "x" * prompt_bytes
        body = f'{{"model": "m", "stream": true, "prompt": "{prompt}"}}'.encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        client = free.pop() if free else (await loop.create_connection(Client, parts.hostname, parts.port))[1]
        found.append(await client.ask(head.encode() + b"\r\n\r\n" + body))
        if client.is_open:  # NGINX closes a connection after 1,000 requests
            free.append(client)
        else:
            client.transport.close()

    began, tasks = time.perf_counter(), []
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    for client in free:
        client.transport.close()
    return found


@dataclass(frozen=True)
class Round:
    """One measurement of a door."""

    p50: float
    p99: float
    """Added seconds to the first token."""
    cpu: float
    """Seconds of the door's processor for a request; 0: there is no door."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def router_command(folder: Path, urls: list[str], port: int) -> list[str]:
    backends = [word for url in urls for word in ("--backend", url)]
    return [sys.executable, "-m", "shardline", "router", *backends, "--port", str(port), "--disable-access-log"]


def deployed(name: str, urls: list[str], port: int) -> str:
    """A configuration of `deploy/` with these addresses."""
    text = (Path(__file__).parents[1] / "deploy" / name).read_text(encoding="utf-8")
    for number, url in enumerate(urls, 8001):
        text = text.replace(f"127.0.0.1:{number}", url.removeprefix("http://"))
    return text.replace("127.0.0.1:9000", f"127.0.0.1:{port}")


def nginx_command(folder: Path, urls: list[str], port: int) -> list[str]:
    text = deployed("nginx/shardline.conf", urls, port)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; events {{ worker_connections 8192; }}\nhttp {{ access_log off;\n{text} }}\n"
    )
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    return [nginx, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def haproxy_command(folder: Path, urls: list[str], port: int) -> list[str]:
    (folder / "haproxy.cfg").write_text(deployed("haproxy/haproxy.cfg", urls, port))
    return [shutil.which("haproxy") or "/usr/sbin/haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


def vllm_router_command(folder: Path, urls: list[str], port: int) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [os.environ.get("VLLM_ROUTER", "vllm-router"), "--worker-urls", *urls, *where, "--log-level", "error"]


_DOORS: dict[str, Callable[[Path, list[str], int], list[str]]] = {
    "shardline router": router_command,
    "nginx": nginx_command,
    "haproxy": haproxy_command,
    "vllm-router": vllm_router_command,
}


@contextlib.contextmanager
def open_door(name: str, urls: list[str], core: int) -> Iterator[tuple[str, int]]:
    """The address and the process of a door that runs on a core of its own; it runs as long as the block."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = _DOORS[name](Path(folder), urls, port)
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"there is no {command[0]}")
        with (Path(folder) / "log").open("wb") as log:
            pinned = ["taskset", "-c", str(core), *command]
            process = subprocess.Popen(pinned, stdout=log, stderr=log, start_new_session=True)
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def processor_seconds(pid: int) -> float:
    """Of a process, its threads and its children."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        fields = Path(f"/proc/{one}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
        for task in Path(f"/proc/{one}/task").iterdir():
            waiting += map(int, (task / "children").read_text(encoding="utf-8").split())
    return total / _TICKS


async def measure(args: argparse.Namespace) -> dict[str, list[Round]]:
    """The rounds of each door that is there."""
    loop = asyncio.get_running_loop()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    mocks = [await loop.create_server(Mock, "127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{mock.sockets[0].getsockname()[1]}" for mock in mocks]
    found: dict[str, list[Round]] = {}
    for _ in range(args.rounds):
        for name in _DOORS:
            try:
                with open_door(name, urls, cores[-1]) as (url, pid):
                    await wait_ready(url)
                    straight = await load(urls[0], args.rate, args.requests, args.prompt_bytes)
                    before = processor_seconds(pid)
                    through = await load(url, args.rate, args.requests, args.prompt_bytes)
                    cpu = (processor_seconds(pid) - before) / args.requests
            except FileNotFoundError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            p50, p99 = (_percentile(through, share) - _percentile(straight, share) for share in (0.5, 0.99))
            found.setdefault(name, []).append(Round(p50, p99, cpu))
    for mock in mocks:
        mock.close()
    return found


async def wait_ready(url: str) -> None:
    """Wait until a request goes through."""
    for _ in range(600):
        with contextlib.suppress(OSError, AssertionError):
            async with asyncio.timeout(5.0):
                await load(url, 100.0, 4, 8)
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _spread(values: list[float]) -> str:
    return f"{1000 * statistics.median(values):7.3f} ({1000 * min(values):.3f} to {1000 * max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=10_000, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-bytes", type=int, default=256)
    args = parser.parse_args()
    print(f"{args.requests} streams of {_EVENTS} events a round, {args.rate:g}/s, {args.prompt_bytes} B prompts; in ms")
    print(f"{'door':18s}  added TTFT, p50{'':12s}  added TTFT, p99{'':12s}  CPU per request")
    for name, rounds in asyncio.run(measure(args)).items():
        columns = ([one.p50 for one in rounds], [one.p99 for one in rounds], [one.cpu for one in rounds])
        print(f"{name:18s}  {'  '.join(map(_spread, columns))}")


if __name__ == "__main__":
    main()
