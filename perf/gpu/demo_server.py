"""The demo model served on a device: from the command to an answer, and to its end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

_READY_SECONDS = 180.0
_END_SECONDS = 30.0
_QUESTION = {"model": "demo", "temperature": 0, "max_tokens": 48,
             "messages": [{"role": "user", "content": "What does os.path.join do?"}]}  # fmt: skip


def run(on: dict[str, str]) -> dict[str, Any]:
    """Start a server, ask it twice, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "shardline", "serve", "demo", "--port", str(port), "--disable-log-requests"]
    for name, value in on.items():
        command += [f"--{name}", value]
    started = time.perf_counter()
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        ready = time.perf_counter() - started
        first, second = (_ask(f"http://127.0.0.1:{port}/v1/chat/completions") for _ in range(2))
        server.terminate()
        code = server.wait(_END_SECONDS)
    finally:
        server.kill()
        server.wait()
    texts = [answer["choices"][0]["message"]["content"] for answer in (first, second)]
    return {
        "ok": bool(texts[0]) and texts[0] == texts[1] and code == 0,
        "ready_s": ready,
        "answer": texts[0][:80],
        "fingerprint": first["system_fingerprint"],
        "exit_code": code,
    }


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"the server was not ready within {_READY_SECONDS:g} s")


def _ask(url: str) -> dict[str, Any]:
    data = json.dumps(_QUESTION).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
