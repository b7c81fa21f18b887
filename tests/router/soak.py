"""A router before backends that fail in all ways, for a long time.

    python -m tests.router.soak --seconds 600

Backends answer, cut streams, say 500, 503 or garbage, die in the middle, go away and come back; clients read, read
slowly, or leave. Every answer must be the one that its prompt has, or an error that says what failed; in the end
nothing runs, and the memory of the router has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.router.backends import Backend, Call

NUM_BACKENDS, NUM_CLIENTS = 3, 12
EXPLAINED = {"backend_failed", "no_backend", "rate_limit_exceeded", "mock_failed", "mock_full"}
"""Codes of errors that a router may answer with when too many backends fail at once."""
MOST_ERRORS = 0.03
GROWTH = 16 << 20
"""Bytes that the router may have more at the end than after a quarter of the time."""


def words_of(prompt: str) -> list[str]:
    """The answer to a prompt."""
    draw = random.Random(zlib.crc32(prompt.encode()))
    return [f"{prompt}.{number} " + "x" * draw.choice((0, 10, 2000)) for number in range(draw.randrange(1, 30))]


def event_of(text: str, finish: str | None = None) -> str:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'cmpl-1', 'created': 1, 'choices': [choice]})}"


class Chaos:
    """What a backend does with its requests, by the dice of a seed."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    async def __call__(self, call: Call) -> None:
        """Answer, or fail."""
        fate = self._dice.random()
        if fate < 0.015:
            await call.answer(500, {"error": {"message": "broken", "code": "mock_failed"}})
        elif fate < 0.03:
            await call.answer(503, {"error": {"message": "full", "code": "mock_full"}}, retry_after="1")
        elif fate < 0.04:
            await call.send(b"this is not HTTP\r\n\r\n")
        elif fate < 0.05:
            call.cut()
        else:
            await self._stream(call, ending=fate)

    async def _stream(self, call: Call, ending: float) -> None:
        words = words_of(call.fields["prompt"])
        resume = call.fields.get("resume")
        begun = len(resume["prompts"][0]["choices"][0]["token_ids"]) if resume else 0
        await call.begin_stream()
        if resume is not None and not resume:
            first = {"contract": "c", "id": "cmpl-1", "created": 1}
            prompt = {"seed": 1, "request": "r", "choices": [{"token_ids": [], "finished": False}]}
            await send_block(call, f": resume {json.dumps({**first, 'prompts': [prompt]})}")
        last = self._dice.randrange(begun, len(words)) if ending < 0.1 else len(words)
        for number in range(begun, last):
            await send_block(call, event_of(words[number]))
            if resume is not None:
                await send_block(call, f": resume [0,0,[[0,[{number}],false]]]")
            await asyncio.sleep(self._dice.choice((0.0, 0.0, 0.002, 0.02)))
        if last < len(words) and ending < 0.075:
            call.cut()
            return
        if last < len(words):
            error = {"message": "it died", "type": "server_error", "param": None, "code": "engine_dead"}
            await send_block(call, f"data: {json.dumps({'error': error})}")
        else:
            await send_block(call, event_of("", "stop"))
        await call.end_stream()


async def send_block(call: Call, block: str) -> None:
    data = f"{block}\n\n".encode()
    await call.send(b"%x\r\n%s\r\n" % (len(data), data))


@dataclass
class Report:
    """What clients have seen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Bytes of the router, after a quarter of the time and at its end."""

    def problems(self) -> list[str]:
        """What must not be; empty: all is well."""
        found = list(self.wrong)
        asked, errors = self.outcomes.total(), self.outcomes["error"]
        if not self.outcomes["whole"] or errors > MOST_ERRORS * asked:
            found.append(f"{errors} errors in {asked} requests")
        if self.memory[1] - self.memory[0] > GROWTH:
            found.append(f"memory has grown from {self.memory[0] >> 20} to {self.memory[1] >> 20} MiB")
        return found


class Client:
    """Asks until a time has come."""

    def __init__(self, url: str, seed: int, report: Report) -> None:
        self._url = url
        self._dice = random.Random(seed)
        self._report = report

    async def run(self, until: float) -> None:
        """Ask until then."""
        async with httpx.AsyncClient(base_url=self._url, timeout=30.0) as http:
            number = 0
            while time.monotonic() < until:
                prompt = f"{self._dice.randrange(100)}-{number}"
                number += 1
                try:
                    self._report.outcomes[await self._ask(http, prompt)] += 1
                except httpx.HTTPError as error:
                    self._report.wrong.append(f"{prompt}: {error!r}")

    async def _ask(self, http: httpx.AsyncClient, prompt: str) -> str:
        leaves = self._dice.randrange(1, 4000) if self._dice.random() < 0.1 else None
        pause = 0.05 if self._dice.random() < 0.03 else 0.0
        raw = b""
        body = {"model": "m", "prompt": prompt, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for part in answer.aiter_raw():
                raw += part
                if leaves is not None and len(raw) > leaves:
                    return "left"
                await asyncio.sleep(pause)
        return self._judge(prompt, answer.status_code, raw)

    def _judge(self, prompt: str, status: int, raw: bytes) -> str:
        blocks = [block for block in raw.split(b"\n\n") if block.startswith(b"data: {")] if status == 200 else [raw]
        events = [json.loads(block.removeprefix(b"data: ")) for block in blocks]
        said = "".join(event["choices"][0]["text"] for event in events if "choices" in event)
        whole = "".join(words_of(prompt))
        if events and "error" in events[-1]:
            if events[-1]["error"]["code"] not in EXPLAINED or not whole.startswith(said):
                self._report.wrong.append(f"{prompt}: {raw[-300:]!r}")
            return "error"
        if said != whole or not raw.endswith(b"data: [DONE]\n\n"):
            self._report.wrong.append(f"{prompt}: {len(said)} of {len(whole)} characters, then {raw[-200:]!r}")
        return "whole"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def run_router(backends: list[Backend]) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL and the process of a router before backends."""
    port = free_port()
    words = [word for backend in backends for word in ("--backend", backend.url)]
    words += ["--port", str(port), "--health-interval", "0.2", "--disable-access-log"]
    process = subprocess.Popen([sys.executable, "-m", "shardline", "router", *words], stderr=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(timeout=5.0) as http:
            async with asyncio.timeout(60.0):
                while not await all_ready(http, f"http://127.0.0.1:{port}"):
                    await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


async def status(http: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    with contextlib.suppress(httpx.TransportError):
        return list((await http.get(f"{url}/router/status")).json()["backends"])
    return []


async def all_ready(http: httpx.AsyncClient, url: str) -> bool:
    states = await status(http, url)
    return bool(states) and all(one["state"] == "ready" and one["numeric_contract"] for one in states)


async def flap(backends: list[Backend], dice: random.Random) -> None:
    """Take one backend after the other away for a while; the first one stays."""
    while True:
        await asyncio.sleep(dice.uniform(1.0, 3.0))
        backend = dice.choice(backends[1:])
        assert backend.server is not None
        backend.server.close()
        await asyncio.sleep(dice.uniform(0.1, 1.0))
        await backend.serve(int(backend.url.rpartition(":")[2]))
        for one in backends:
            one.calls.clear()


def memory_of(process: subprocess.Popen[bytes]) -> int:
    """Resident bytes."""
    text = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return int(text.partition("VmRSS:")[2].split()[0]) << 10


async def soak(seconds: float, seed: int) -> Report:
    """Run for a time, then wait until nothing runs."""
    backends = [Backend(f"b{index}", Chaos(seed + index), contract="c") for index in range(NUM_BACKENDS)]
    try:
        for backend in backends:
            await backend.serve()
        return await _soak(backends, seconds, seed)
    finally:
        for backend in backends:
            if backend.server is not None:
                backend.server.close()


async def _soak(backends: list[Backend], seconds: float, seed: int) -> Report:
    report = Report()
    async with run_router(backends) as (url, process):
        flapping = asyncio.create_task(flap(backends, random.Random(seed)))
        until = time.monotonic() + seconds
        clients = [Client(url, 100 * seed + index, report).run(until) for index in range(NUM_CLIENTS)]

        async def measure() -> None:
            await asyncio.sleep(seconds / 4)
            report.memory.append(memory_of(process))

        try:
            await asyncio.gather(*clients, measure())
        finally:
            flapping.cancel()
        report.memory.append(memory_of(process))
        async with httpx.AsyncClient(timeout=5.0) as http:
            for _ in range(200):
                running = [one["requests"] for one in await status(http, url)]
                if running and not any(running):
                    break
                await asyncio.sleep(0.05)
            else:
                report.wrong.append(f"requests that never end: {running}")
        if process.poll() is not None:
            report.wrong.append(f"the router has ended with {process.returncode}")
    return report


def main() -> int:
    """Soak, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = asyncio.run(soak(arguments.seconds, arguments.seed))
    before, after = (number / 2**20 for number in report.memory)
    print(f"{arguments.seconds:g} s: {dict(report.outcomes)}; memory {before:.1f} MiB, then {after:.1f} MiB")
    problems = report.problems()
    print("\n".join(problems[:10]) or "PASSED")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
