"""Real servers behind a real router: killed in the middle of their answers, and restarted one after the other.

SHARDLINE_KILLS says how often a server is killed, and all are restarted (the suite does each once; 100 by hand).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forks import ForkedProcess, ForkServer
from tests.router.streams import said_by

KILLS = int(os.environ.get("SHARDLINE_KILLS", "1"))
SERVERS = 2 if KILLS == 1 else 3
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "minLength": 100, "maxLength": 300}},
                "required": ["text"],
            },
        },
    }
    for name in ("write", "read")
]
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 90}
USAGE = {"stream_options": {"include_usage": True}}
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, **USAGE}
HI = [{"role": "user", "content": "Hi"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0.0, **LONG}),
    (CHAT, {"messages": HI, "n": 2, "seed": 3, "logprobs": True, "top_logprobs": 2, **LONG}),
    (COMPLETIONS, {"prompt": "A list:", "seed": 4, "stop": ["\n\n\n\n", "zzzz"], "repetition_penalty": 1.1, **LONG}),
    (CHAT, {"messages": HI, "seed": 5, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400, **USAGE}),
    (
        CHAT,
        {
            "messages": HI,
            "seed": 6,
            "n": 2,
            "max_tokens": 400,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            **USAGE,
        },
    ),
    ("/v1/responses", {"input": "Hi", "seed": 7, "max_output_tokens": 300, "ignore_eos": True}),
    ("/v1/messages", {"messages": HI, "seed": 8, "max_tokens": 300}),
]


class Site:
    """Demo servers behind a router, each a process of its own."""

    def __init__(self, num_servers: int, forks: ForkServer) -> None:
        self._forks = forks
        self.ports = [free_port() for _ in range(num_servers)]
        self.servers = [self._start_server(port) for port in self.ports]
        port = free_port()
        backends = [word for port in self.ports for word in ("--backend", f"http://127.0.0.1:{port}")]
        self.router = self.start("router", *backends, "--port", str(port), "--health-interval", "0.1")
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=120.0)
        self.wait_for(lambda: self.states() == ["ready"] * num_servers, "all servers are ready")

    def start(self, *words: str) -> ForkedProcess:
        """Start `shardline WORDS…`."""
        with open(os.devnull, "w") as nowhere:
            return self._forks.start_command(*words, output=nowhere.fileno())

    def _start_server(self, port: int) -> ForkedProcess:
        flags = "--seed", "7", "--shutdown-delay", "0.5", "--no-enable-prefix-caching"
        return self.start("serve", "demo", "--port", str(port), *flags)

    def restart(self, index: int) -> None:
        """Start a server that has ended."""
        self.servers[index].wait(120.0)
        self.servers[index] = self._start_server(self.ports[index])

    def states(self) -> list[str]:
        """The states of the backends."""
        with contextlib.suppress(httpx.TransportError):
            return [backend["state"] for backend in self.client.get("/router/status").json()["backends"]]
        return []

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 90.0
        while not holds():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def act(self, action: str, index: int) -> None:
        """Have the router do something with a backend."""
        url = f"http://127.0.0.1:{self.ports[index]}"
        self.client.post(f"/router/{action}", json={"url": url}).raise_for_status()

    def stream(self, path: str, fields: dict[str, Any], flows: threading.Event | None = None, after: int = 0) -> bytes:
        """A whole stream; `flows` is set after so many events."""
        raw = b""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for part in answer.iter_raw():
                raw += part
                if flows is not None and raw.count(b"\n\n") > after:
                    flows.set()
        return raw

    def resumes(self) -> float:
        """How many streams have gone on elsewhere."""
        found = re.search(r"^shardline_router:resumes_total (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def close(self) -> None:
        self.client.close()
        for process in (*self.servers, self.router):
            if process.poll() is None:
                process.kill()
            process.wait(120.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def site(fork_server: ForkServer) -> Iterator[Site]:
    with contextlib.closing(Site(SERVERS, fork_server)) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> list[dict[str, Any]]:
    return [said_by(path, site.stream(path, fields)) for path, fields in REQUESTS]


def has_come(file: Path, process: ForkedProcess) -> bool:
    """Whether a file is there, or the process that makes it has ended."""
    return file.exists() or process.poll() is not None


def in_threads(calls: Sequence[Callable[[], Any]]) -> tuple[list[threading.Thread], list[Any]]:
    """Threads with these calls, and their results."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    return threads, results


@pytest.mark.parametrize("number", range(KILLS))
def test_resume_after_a_kill(site: Site, undisturbed: list[dict[str, Any]], number: int) -> None:
    victim = number % len(site.servers)
    others = [index for index in range(len(site.servers)) if index != victim]
    for index in others:
        site.act("drain", index)
    before = site.resumes()
    flows = [threading.Event() for _ in REQUESTS]
    after = 5 + 3 * (number * 7 % 40)
    calls = [partial(site.stream, *request, flow, after) for request, flow in zip(REQUESTS, flows, strict=True)]
    threads, results = in_threads(calls)
    assert flows[0].wait(60.0)
    for index in others:
        site.act("undrain", index)
    site.servers[victim].kill()
    site.wait_for(lambda: site.states()[victim] == "down", "its death is seen")
    for thread in threads:
        thread.join(120.0)
    for result, expected, (path, fields) in zip(results, undisturbed, REQUESTS, strict=True):
        assert said_by(path, result) == expected, fields
    assert site.resumes() > before, "the kill came too late"
    site.restart(victim)
    site.wait_for(lambda: site.states() == ["ready"] * SERVERS, "the server has not come back")


@pytest.mark.parametrize("number", range(KILLS))
def test_a_rollout_under_load_has_no_error(
    site: Site, undisturbed: list[dict[str, Any]], tmp_path: Path, number: int
) -> None:
    """The command asks this test for a restart, and waits until it is done."""
    command = f"touch {tmp_path}/asked-{{port}}; until [ -e {tmp_path}/done-{{port}} ]; do sleep 0.1; done"
    is_over = threading.Event()

    def load(index: int) -> list[tuple[int, dict[str, Any]]]:
        said: list[tuple[int, dict[str, Any]]] = []
        while not is_over.is_set():
            chosen = (number + index + len(said)) % len(REQUESTS)
            path, fields = REQUESTS[chosen]
            said.append((chosen, said_by(path, site.stream(path, fields))))
            is_over.wait(0.3)  # servers that start have some time of the processor, too
        return said

    threads, results = in_threads([partial(load, index) for index in range(3)])
    rollout = site.start("router", "rollout", "--url", site.url, "--restart", command)
    try:
        for index, port in enumerate(site.ports):
            asked = tmp_path / f"asked-{port}"
            site.wait_for(partial(has_come, asked, rollout), "a restart is asked for")
            assert asked.exists()
            site.servers[index].send_signal(signal.SIGTERM)
            site.restart(index)
            (tmp_path / f"done-{port}").touch()
        assert rollout.wait(120.0) == 0
    finally:
        is_over.set()
        rollout.kill()
        rollout.wait(120.0)
        for thread in threads:
            thread.join(120.0)
    assert site.states() == ["ready"] * SERVERS
    for chosen, said in (pair for result in results for pair in result):
        assert said == undisturbed[chosen]
