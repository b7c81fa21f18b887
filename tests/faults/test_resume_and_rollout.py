"""Real servers behind a real router: killed in the middle of their answers, and restarted one after the other.

SHARDLINE_KILLS says how often a server is killed, and all are restarted (the suite does each once; 100 by hand).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forks import ForkedProcess, ForkServer
from tests.router.streams import said_by

KILLS = int(os.environ.get("SHARDLINE_KILLS", "1"))
SERVERS = 2 if KILLS == 1 else 3
TRIES = 5
"""To kill a server before all of its streams have ended: clients may not have the cores while it computes them."""
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
    """Demo servers behind a router, each a process of its own, whose output goes to a file in `folder`."""

    def __init__(self, num_servers: int, forks: ForkServer, folder: Path) -> None:
        self._forks = forks
        self._folder = folder
        port, *self.ports = free_ports(1 + num_servers)
        self._others: list[ForkedProcess] = []
        self.servers: list[ForkedProcess] = []
        self.url = f"http://127.0.0.1:{port}"
        # A connection that is kept may be closed by a router that was kept from the cores, just as a request comes.
        self.client = httpx.Client(
            base_url=self.url, timeout=120.0, limits=httpx.Limits(max_keepalive_connections=0, max_connections=None)
        )

    def open(self) -> None:
        """Start all, and wait until all are ready."""
        self.servers += [self._start_server(port) for port in self.ports]
        backends = [word for port in self.ports for word in ("--backend", f"http://127.0.0.1:{port}")]
        self.start("router", *backends, "--port", self.url.rpartition(":")[2], "--health-interval", "0.1")
        self.wait_until_ready()

    def start(self, *words: str) -> ForkedProcess:
        """Start `shardline WORDS…`."""
        self._others.append(self._start(*words))
        return self._others[-1]

    def _start(self, *words: str) -> ForkedProcess:
        with open(self._folder / f"{words[0]}.log", "a") as log:
            return self._forks.start_command(*words, output=log.fileno())

    def _start_server(self, port: int) -> ForkedProcess:
        flags = "--seed", "7", "--shutdown-delay", "0.5", "--no-enable-prefix-caching"
        return self._start("serve", "demo", "--port", str(port), *flags)

    def restart(self, index: int) -> None:
        """Start a server that ends."""
        self.servers[index].wait()
        self.servers[index] = self._start_server(self.ports[index])

    def states(self) -> list[str]:
        """The states of the backends; none: the router does not listen yet."""
        with contextlib.suppress(httpx.ConnectError):
            return [backend["state"] for backend in self.client.get("/router/status").json()["backends"]]
        return []

    def wait_until_ready(self) -> None:
        """Wait for all servers."""
        self.wait_for(lambda: self.states() == ["ready"] * len(self.ports))

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait for as long as a test may take, unless a process has failed."""
        while not holds():
            codes = [process.poll() for process in (*self.servers, *self._others)]
            assert set(codes) <= {None, 0, -signal.SIGKILL}, f"a process has failed, see {self._folder}"
            time.sleep(0.05)

    def act(self, action: str, index: int) -> None:
        """Have the router do something with a backend."""
        url = f"http://127.0.0.1:{self.ports[index]}"
        self.client.post(f"/router/{action}", json={"url": url}).raise_for_status()

    def stream(self, path: str, fields: dict[str, Any], note: Callable[[int], None] = lambda count: None) -> bytes:
        """A whole stream; `note` hears how many events have come."""
        raw = b""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for part in answer.iter_raw():
                raw += part
                note(raw.count(b"\n\n"))
        return raw

    def resumes(self) -> float:
        """How many streams have gone on elsewhere."""
        found = re.search(r"^shardline_router:resumes_total (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def close(self) -> None:
        self.client.close()
        for process in (*self.servers, *self._others):
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that no other program gets by chance while a server restarts."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


@pytest.fixture(scope="module")
def site(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with contextlib.closing(Site(SERVERS, fork_server, tmp_path_factory.mktemp("site"))) as made:
        made.open()
        yield made


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> list[dict[str, Any]]:
    return [said_by(path, site.stream(path, fields)) for path, fields in REQUESTS]


def said_while_one_dies(site: Site, victim: int, after: int) -> list[dict[str, Any]]:
    """What all requests say whose server is killed after so many events of the first one, once each has begun."""
    others = [index for index in range(len(site.servers)) if index != victim]
    for index in others:
        site.act("drain", index)
    num_events = [0] * len(REQUESTS)
    others_can_go_on = threading.Event()

    def note(index: int, count: int) -> None:
        num_events[index] = count
        if others_can_go_on.is_set() and num_events[0] > after:
            site.servers[victim].kill()

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        streams = [pool.submit(site.stream, *request, partial(note, index)) for index, request in enumerate(REQUESTS)]
        site.wait_for(lambda: all(num_events) or any(stream.done() for stream in streams))
        for index in others:
            site.act("undrain", index)
        others_can_go_on.set()
    site.servers[victim].kill()
    return [said_by(path, stream.result()) for stream, (path, _) in zip(streams, REQUESTS, strict=True)]


@pytest.mark.parametrize("number", range(KILLS))
def test_resume_after_a_kill(site: Site, undisturbed: list[dict[str, Any]], number: int) -> None:
    victim = number % len(site.servers)
    before = site.resumes()
    for _ in range(TRIES):
        said = said_while_one_dies(site, victim, after=5 + 3 * (number * 7 % 40))
        for own, expected, (_, fields) in zip(said, undisturbed, REQUESTS, strict=True):
            assert own == expected, fields
        site.wait_for(lambda: site.states()[victim] == "down")
        site.restart(victim)
        site.wait_until_ready()
        if site.resumes() > before:
            return
    pytest.fail("the streams always ended before the kill")


@pytest.mark.parametrize("number", range(KILLS))
def test_a_rollout_under_load_has_no_error(
    site: Site, undisturbed: list[dict[str, Any]], tmp_path: Path, number: int
) -> None:
    """The command asks this test for a restart, and waits until it is done, or the rollout has ended."""
    done = f"[ -e {tmp_path}/done-{{port}} ]"
    command = f"touch {tmp_path}/asked-{{port}}; while kill -0 $PPID && ! {done}; do sleep 0.1; done; {done}"
    is_over = threading.Event()

    def load(index: int) -> list[tuple[int, dict[str, Any]]]:
        said: list[tuple[int, dict[str, Any]]] = []
        while not is_over.is_set():
            chosen = (number + index + len(said)) % len(REQUESTS)
            path, fields = REQUESTS[chosen]
            said.append((chosen, said_by(path, site.stream(path, fields))))
            is_over.wait(0.3)  # servers that start have some time of the processor, too
        return said

    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load, index) for index in range(3)]
        rollout = site.start("router", "rollout", "--url", site.url, "--restart", command)
        try:
            for index, port in enumerate(site.ports):
                asked = tmp_path / f"asked-{port}"
                site.wait_for(partial(has_come, asked, rollout))
                assert asked.exists()
                site.servers[index].send_signal(signal.SIGTERM)
                site.restart(index)
                (tmp_path / f"done-{port}").touch()
            assert rollout.wait() == 0
        finally:
            is_over.set()
            rollout.kill()
    site.wait_until_ready()
    for chosen, said in (pair for one in loads for pair in one.result()):
        assert said == undisturbed[chosen]


def has_come(file: Path, process: ForkedProcess) -> bool:
    """Whether a file is there, or the process that makes it has ended."""
    return file.exists() or process.poll() is not None
