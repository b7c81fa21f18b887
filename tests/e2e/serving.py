"""`shardline serve` as a user starts it: a real process on a real port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai


class Server:
    """A running server and what it printed."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        """All that the server logged so far."""
        return "\n".join(self.lines)

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks, replica by replica."""
        return [int(pid) for pid in re.findall(r"rank \d+: .*?pid (\d+)", self.output)]

    def client(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^shardline:{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
        assert values, f"no metric {name} in\n{text}"
        return sum(float(value) for value in values)

    def wait_until(self, holds: object, what: str, timeout: float = 20.0) -> None:
        """Poll `holds()` until it is true."""
        assert callable(holds)
        deadline = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout} s: {what}\n{self.output}"
            time.sleep(0.05)


@contextmanager
def serve(
    *arguments: str, env: dict[str, str] | None = None, python: str = sys.executable, port: int = 0
) -> Iterator[Server]:
    """A server with these arguments that is ready to answer; it is stopped at the end of the block.

    `python`: the interpreter of an environment that has Shardline. `port`: 0: any free one.
    """
    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    process = subprocess.Popen(
        [python, "-m", "shardline", "serve", *arguments, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    server = Server(process, port)
    try:
        server.wait_until(lambda: "startup complete" in server.output or process.poll() is not None, "start", 90)
        assert process.poll() is None, server.output
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.stdout is not None
        server._reader.join(5)
        process.stdout.close()
