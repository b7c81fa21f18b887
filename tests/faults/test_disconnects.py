"""Clients that leave at any point: afterwards the server has as many tasks, files, blocks and requests as before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import time
from pathlib import Path

from shardline.api.async_llm import AsyncLLM
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.app import create_app
from shardline.server.launch import make_http_server, bind_listener

COUNT = int(os.environ.get("SHARDLINE_DISCONNECTS", "200"))
AT_ONCE = 16
MEMORY_GROWTH = 16 << 20
"""Bytes by which the memory of a process may grow, whatever the number of clients."""
BODY = {"model": "demo", "prompt": "The first thing that", "max_tokens": 400, "ignore_eos": True}


async def leave(port: int, number: int) -> None:
    """One client. Its number decides what it asks for, and when it leaves."""
    rng = random.Random(number)
    body = BODY | {"stream": rng.random() < 0.8, "n": rng.choice((1, 1, 3)), "prompt": f"{rng.random()} is a number"}
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        match number % 4:
            case 0:  # in the middle of the request
                writer.write((head + payload)[: rng.randrange(len(head) + len(payload))])
                await writer.drain()
            case 1:  # at once, while it waits or is in prefill
                writer.write(head + payload)
                await writer.drain()
                await asyncio.sleep(rng.random() * 0.02)
            case _:  # with tokens on their way
                writer.write(head + payload)
                await writer.drain()
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(rng.randrange(1, 2000)), 0.3)
    if number % 2:
        writer.transport.abort()  # a reset
    else:
        writer.close()


class Usage:
    """What the server and its engine hold."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._pids = [os.getpid(), *map(int, re.findall(r"pid (\d+)", "\n".join(llm.model.report)))]

    def held(self) -> dict[str, int]:
        """What must be as before."""
        (stats,) = self._llm.stats()
        files = {f"files of {pid}": len(os.listdir(f"/proc/{pid}/fd")) for pid in self._pids}
        requests = {"running": stats.num_running, "waiting": stats.num_waiting, "blocks": stats.kv_blocks_used}
        return {"tasks": len(asyncio.all_tasks()), **requests, **files}

    def memory(self) -> list[int]:
        """Bytes of each process."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._pids]
        return [count * os.sysconf("SC_PAGE_SIZE") for count in pages]

    async def settle(self, expected: dict[str, int] | None) -> dict[str, int]:
        """What is held once that is `expected`, or once no request is left if that is None."""
        deadline = time.monotonic() + 15.0
        while True:
            await asyncio.sleep(0.1)
            held = self.held()
            if held == expected or (expected is None and not held["running"] + held["waiting"] + held["blocks"]):
                return held
            assert time.monotonic() < deadline, f"{held} is not {expected or 'idle'}"


async def serve_clients(count: int) -> None:
    # Without restarts there is no fork server, which would begin in the middle.
    options = {"device": "cpu", "cpu_threads": 1, "kv_cache_memory": "32MiB", "on_failure": "exit"}
    llm = AsyncLLM(EngineConfig.from_options(model="demo", **options))
    config = ServerConfig()
    try:
        await llm.wait_ready()
        with contextlib.closing(bind_listener("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            server = make_http_server(create_app(llm, config), config, 1)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            usage = Usage(llm)
            try:
                await run_clients(port, range(4 * AT_ONCE))  # pools and caches fill
                await asyncio.sleep(0.5)
                before, memory = await usage.settle(None), usage.memory()
                await run_clients(port, range(count))
                assert await usage.settle(before) == before
                growth = [after - first for first, after in zip(memory, usage.memory(), strict=True)]
                assert max(growth) < MEMORY_GROWTH, growth
            finally:
                server.should_exit = True
                await serving
    finally:
        await llm.close()


async def run_clients(port: int, numbers: range) -> None:
    for first in range(0, len(numbers), AT_ONCE):
        await asyncio.gather(*(leave(port, number) for number in numbers[first : first + AT_ONCE]))


def test_clients_that_leave_leave_nothing_behind() -> None:
    asyncio.run(asyncio.wait_for(serve_clients(COUNT), 60 + COUNT / 4))
