"""The memory of a server after large requests."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from tests.server.test_launch import client, process

pytestmark = pytest.mark.slow  # it starts a server process

MEGABYTE = 1 << 20


def resident(pid: int) -> float:
    """Memory of a process, in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / MEGABYTE


def send(http: httpx.Client, path: str, **body: object) -> int:
    data = json.dumps(body).encode()
    return http.post(path, content=data, headers={"Content-Type": "application/json"}).status_code


def test_memory_comes_back_after_large_bodies() -> None:
    user = [{"role": "user", "content": "Hi"}]
    with process() as server, client(server.url()) as http:
        for _ in range(20):
            assert send(http, "/v1/chat/completions", messages=user, max_tokens=4) == 200
        assert send(http, "/v1/completions", prompt=[7] * 1000, max_tokens=1) in (200, 400)
        before = resident(server.popen.pid)
        text = "A stream must not wait for this. " * 450_000
        assert send(http, "/v1/chat/completions", messages=[{"role": "user", "content": text}]) == 400
        many = [{"role": "user", "content": text[:3800]}] * 4000
        assert send(http, "/v1/chat/completions", messages=many) == 400
        assert send(http, "/v1/chat/completions", messages=user, stop=["ab"] * 240_000) == 400
        assert send(http, "/v1/completions", prompt=text) == 400
        assert send(http, "/v1/completions", prompt=[7] * 900_000) == 400
        deadline = time.monotonic() + 30.0
        while (after := resident(server.popen.pid)) > 1.2 * before:
            assert time.monotonic() < deadline, f"{before:.0f} MB before, {after:.0f} MB after"
            time.sleep(0.2)
