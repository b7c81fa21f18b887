"""A server that may open few files: it refuses connections in words, and keeps what restarts need."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow
CLIENTS = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """The process of a server with 64 descriptors, its port, and its log."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = f"ulimit -Sn 40; ulimit -Hn 64; exec {sys.executable} -m tests.server.serve_fake '{{}}'"
        process = subprocess.Popen(["bash", "-c", command], stderr=file)
    try:
        deadline = time.monotonic() + 30
        while not (found := re.search(r"serving .* at http://127.0.0.1:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, int(found[1]), log
    finally:
        process.terminate()
        process.wait(20)


def test_connections_are_refused_before_descriptors_run_out(
    server: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, log = server
    assert re.search(r"Max open files +64 +64", Path(f"/proc/{process.pid}/limits").read_text())
    with contextlib.ExitStack() as idle, httpx.Client(trust_env=False, timeout=10) as http:
        clients = [idle.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(CLIENTS)]
        deadline = time.monotonic() + 10
        refused = 0
        while refused < CLIENTS - 64:  # those at the end of the queue
            assert time.monotonic() < deadline
            clients[-1 - refused].settimeout(10)
            head, _, body = clients[-1 - refused].recv(65536).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 2" in head.lower()
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert clients[-1 - refused].recv(1) == b"", "the connection is closed"
            refused += 1
        time.sleep(1.2)  # those that were given time to ask are refused, too
        assert len(os.listdir(f"/proc/{process.pid}/fd")) <= 64 - 22
        answer = http.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x" * 30_000, "max_tokens": 1})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert answer.json()["error"]["type"] == "server_error"
        assert http.get(f"http://127.0.0.1:{port}/live").status_code == 200
    deadline = time.monotonic() + 10
    with httpx.Client(trust_env=False, timeout=10) as http:
        while http.post(f"http://127.0.0.1:{port}/tokenize", json={"prompt": "x"}).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert "the limit is 64 open files a process (RLIMIT_NOFILE); raise it: `ulimit -n 65536`" in log.read_text()
    assert log.read_text().count("refused with 503") <= 3
    assert "Traceback" not in log.read_text()
