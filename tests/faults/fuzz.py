"""Random and truncated frames for every listener of a cluster: none is accepted, memory stays flat, nodes are served.

    python -m tests.faults.fuzz --frames 1000000

Each listener runs in a process of its own. Two processes send it frames, each frame over a connection of its own, and
many connections at once. Afterwards, whom the listener is for must get in. Two listeners are attacked at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from shardline import handshake
from shardline.cluster import links
from shardline.cluster.wire import NodeSocket
from shardline.runtime.parallel.rendezvous import LocalStore, Meeting, connect_ranks
from tests.cluster.heads import FakeHead

ATTACKERS = 2
_WINDOW = 24
"""Connections that an attacker has open at once; a listener admits 256 unproven ones."""
_PARTS = 10
"""Parts of the frames. Memory is first looked at after one: allocators have filled their pools by then."""
MEMORY_GROWTH = 8 << 20
_TOKEN = "the-token-of-this-fuzzing"
_KEY = bytes(range(32))


def handshake_frame(purpose: str, rng: random.Random) -> bytes:
    """Most have the right length, magic bytes and purpose, and a random key and proof; others are cut, or random."""
    frame = rng.randbytes(rng.choice((0, 1, 31, 175, 176, 176, 176, 300)))
    if len(frame) < 176 or rng.randrange(10) == 0:
        return frame
    greeting = handshake._MAGIC + purpose.encode().ljust(96, b"\0")
    return (greeting + frame[len(greeting) :])[: rng.choice((rng.randrange(1, 176), 176, 176, 176, 300))]


def http_frame(rng: random.Random) -> bytes:
    """Bytes, and requests that are cut, mutated or whose bodies are no JSON."""
    body = b'{"model": "demo", "prompt": "The first", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(1, 300))
        case 1:
            return (head + body)[: rng.randrange(1, len(head) + len(body))]
        case 2:
            return head + rng.randbytes(len(body))
        case _:
            place = rng.randrange(len(head))
            return head[:place] + rng.randbytes(1) + head[place + 1 :] + b"{" * len(body)


@contextlib.contextmanager
def serve_rank() -> Iterator[tuple[int, Callable[[], bool]]]:
    """Rank 0 waits for rank 1."""
    store = LocalStore()
    ends: dict[int, dict[str, dict[int, socket.socket]]] = {}

    def meet(rank: int) -> None:
        ends[rank] = connect_ranks(Meeting(store, "127.0.0.1", nonce, 36000.0), rank, {"tensor": (0, 1)})

    nonce = secrets.token_bytes(32)
    first = threading.Thread(target=meet, args=(0,), daemon=True)
    first.start()
    port = int(store.get("address/0", 10.0).decode().rpartition(":")[2])

    def serves() -> bool:
        assert not ends, "a stranger was taken for rank 1"
        meet(1)
        first.join(10.0)
        ends[0]["tensor"][1].sendall(b"hello")
        return bool(ends[1]["tensor"][0].recv(5, socket.MSG_WAITALL) == b"hello")

    yield port, serves


@contextlib.contextmanager
def serve_head() -> Iterator[tuple[int, Callable[[], bool]]]:
    """The head's socket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    head = FakeHead(_TOKEN, port)

    def serves() -> bool:
        assert head.received.empty(), "a stranger's message has reached the head"
        node = NodeSocket(_TOKEN, "127.0.0.1", port)
        node.send(b"hello")
        _, body = head.receive()
        node.close()
        return body.endswith(b"hello")

    yield port, serves
    head.close()


@contextlib.contextmanager
def serve_link() -> Iterator[tuple[int, Callable[[], bool]]]:
    """The listener of the measuring of links."""
    links.ACCEPT_SECONDS = 36000.0
    port = links._listen("127.0.0.1", _KEY)

    def serves() -> bool:
        sock, _ = handshake.connect("127.0.0.1", port, _KEY, "link", 5.0)
        with sock:
            sock.sendall(b"p")
            return sock.recv(1) == b"p"

    yield port, serves


@contextlib.contextmanager
def serve_http() -> Iterator[tuple[int, Callable[[], bool]]]:
    """The HTTP server, with a real engine."""
    import httpx

    from shardline.api.async_llm import AsyncLLM
    from shardline.config.engine import EngineConfig
    from shardline.config.server import ServerConfig
    from shardline.server.app import create_app
    from shardline.server.launch import bind_listener, make_http_server

    ports: list[int] = []
    servers = []

    async def run() -> None:
        llm = AsyncLLM(EngineConfig.from_options(model="demo", device="cpu", cpu_threads=1, kv_cache_memory="32MiB"))
        try:
            await llm.wait_ready()
            with contextlib.closing(bind_listener("127.0.0.1", 0)) as listener:
                config = ServerConfig(uvicorn_log_level="error")
                server = make_http_server(create_app(llm, config), config, 1)
                servers.append(server)
                ports.append(listener.getsockname()[1])
                await server.serve(sockets=[listener])
        finally:
            await llm.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    while not ports:
        assert thread.is_alive(), "the server has not started"
        time.sleep(0.05)

    def serves() -> bool:
        body = {"model": "demo", "prompt": "The", "max_tokens": 1}
        return httpx.post(f"http://127.0.0.1:{ports[0]}/v1/completions", json=body, timeout=20.0).status_code == 200

    yield ports[0], serves
    servers[0].should_exit = True
    thread.join()


LISTENERS: dict[str, tuple[Callable[[], Any], Callable[[random.Random], bytes]]] = {
    "rank": (serve_rank, partial(handshake_frame, "tensor: 1 to 0")),
    "head": (serve_head, partial(handshake_frame, "node")),
    "link": (serve_link, partial(handshake_frame, "link")),
    "http": (serve_http, http_frame),
}


def attack(port: int, make_frame: Callable[[random.Random], bytes], count: int, seed: int) -> None:
    """Send frames. An answer that accepts one ends this process with an error."""
    rng = random.Random(seed)
    waiting: collections.deque[socket.socket] = collections.deque()

    def finish(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            answer = connection.recv(256)
            assert not answer.startswith(b"HTTP/1.1 2"), "a frame was accepted"
            assert not answer.startswith(handshake._MAGIC) or len(answer) <= 48, "a frame was answered with a proof"
        connection.close()

    for number in range(count):
        connection = socket.socket()
        connection.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        connection.bind((f"127.0.{1 + seed % 250}.{1 + number % 250}", 0))  # one address has too few ports
        connection.settimeout(5.0)
        connection.connect(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            connection.send(make_frame(rng))
            connection.shutdown(socket.SHUT_WR)
        waiting.append(connection)
        if len(waiting) == _WINDOW:
            finish(waiting.popleft())
    while waiting:
        finish(waiting.popleft())


def serve(name: str) -> None:
    """Run a listener in this process until standard input says to check it."""
    with LISTENERS[name][0]() as (port, serves):
        print(port, flush=True)
        sys.stdin.readline()
        print("yes" if serves() else "no", flush=True)


def fuzz(name: str, frames: int) -> tuple[float, int]:
    """Send frames to a listener; returns the seconds that it took, and the bytes by which its memory grew.

    Raises:
        AssertionError: a frame was accepted, memory grew, or the listener does not serve afterwards.
    """
    command = [sys.executable, "-m", "tests.faults.fuzz", "--serve", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdin is not None
        assert listener.stdout is not None
        try:
            port = int(listener.stdout.readline())
            began = time.monotonic()
            for part in range(_PARTS):
                _run_attackers(name, port, frames // _PARTS, part * ATTACKERS)
                if part == 0:
                    memory = _memory(listener.pid)
                print(f"{name}: {part + 1}/{_PARTS}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            seconds, growth = time.monotonic() - began, _memory(listener.pid) - memory
            listener.stdin.write("check\n")
            listener.stdin.flush()
            assert listener.stdout.readline().strip() == "yes", f"the listener {name} does not serve any more"
            assert growth < MEMORY_GROWTH, f"the memory of the listener {name} grew by {growth} bytes"
            return seconds, growth
        finally:
            listener.kill()


def _run_attackers(name: str, port: int, frames: int, first_seed: int) -> None:
    command = [sys.executable, "-m", "tests.faults.fuzz", "--attack", name, str(port), str(frames // ATTACKERS)]
    attackers = [subprocess.Popen([*command, str(first_seed + index)]) for index in range(ATTACKERS)]
    codes = [attacker.wait() for attacker in attackers]
    assert not any(codes), f"attackers of {name} ended with {codes}"


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Attack all listeners, one after another, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=20_000, help="for each listener")
    parser.add_argument("--only", choices=LISTENERS, action="append")
    parser.add_argument("--serve", choices=LISTENERS, help=argparse.SUPPRESS)
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.attack:
        name, port, count, seed = arguments.attack
        attack(int(port), LISTENERS[name][1], int(count), int(seed))
        return
    print(f"{'listener':<10}{'frames':>10}{'seconds':>9}{'a second':>10}{'memory':>12}")
    names = arguments.only or ("http", "head", "link", "rank")  # the slowest first
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: fuzz(name, arguments.frames), names)
        for name, (seconds, growth) in zip(names, found, strict=True):
            rate = arguments.frames / seconds
            row = f"{name:<10}{arguments.frames:>10,}{seconds:>9.1f}{rate:>10,.0f}{growth / 1024:>+9,.0f} KiB"
            print(row, flush=True)
    print(f"PASSED: {len(names) * arguments.frames:,} frames, none was accepted, and all listeners serve")


if __name__ == "__main__":
    main()
