"""`shardline serve` as a user starts it: a real process on a real port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import httpx
import openai

if TYPE_CHECKING:  # the environment of tests/clients has no Shardline
    from tests.forks import ForkServer, Process


class Server:
    """A running server and what it printed."""

    def __init__(self, process: Process, output: TextIO) -> None:
        self.process = process
        self._output = output
        self.url = ""
        """Known once the server is ready."""
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._output:
            for line in self._output:
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
    *arguments: str,
    env: dict[str, str] | None = None,
    python: str = sys.executable,
    port: int = 0,
    forks: ForkServer | None = None,
) -> Iterator[Server]:
    """A server with these arguments that is ready to answer; it is stopped at the end of the block.

    `python`: the interpreter of an environment that has Shardline. `port`: 0: any free one. `forks`: what starts it;
    None: it starts as users start it.
    """
    words = ["serve", *arguments, "--port", str(port)]
    reader, writer = os.pipe()
    process: Process
    try:
        if forks is not None:
            process = forks.start_command(*words, output=writer, environment=env)
        else:
            variables = {**os.environ, **(env or {})}
            command = [python, "-m", "shardline", *words]
            process = subprocess.Popen(command, stdout=writer, stderr=writer, text=True, env=variables)
    finally:
        os.close(writer)
    server = Server(process, os.fdopen(reader))
    try:
        server.wait_until(lambda: "startup complete" in server.output or process.poll() is not None, "start", 90)
        ready = re.search(r"startup complete in .* at (http://\S+)$", server.output, re.MULTILINE)
        assert process.poll() is None, server.output
        assert ready is not None, server.output
        server.url = ready[1]
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        server._reader.join(5)
