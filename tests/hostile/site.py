"""A live server of two replicas with a victim beside it, and clients that send it hostile cases."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.serving import Server, serve
from tests.hostile import bodies
from tests.hostile.bodies import Case

CLIENTS = 4
ANSWER_SECONDS = 60.0
"""A client whose answer takes longer counts as hung."""
SHORT_LIVED = ("shardline: sandbox (",)
"""How the titles of processes begin that may come and go."""
_SETTLE_SECONDS = 30.0
_CACHED_WORDS = 10_000
_STALL_SECONDS = 20.0
"""A victim that is silent for longer is not waited for."""


@dataclass(frozen=True)
class Answer:
    """What came of a case. `problem` is empty if it is an answer as it must be, or if the client left."""

    case: Case
    status: int
    problem: str


@dataclass(frozen=True)
class Process:
    """A process of the server. Pids are used again, so the time of its start belongs to it."""

    pid: int
    started: int
    title: str

    @property
    def memory(self) -> int:
        """Bytes of memory of its own. Mapped files and shared memory do not count."""
        return self._read_status("RssAnon:")

    @property
    def resident(self) -> int:
        """Bytes of memory, mapped files included."""
        return self._read_status("VmRSS:")

    def _read_status(self, name: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            return int(status.partition(name)[2].split()[0]) << 10
        return 0


class Site:
    """The server and the victim. `server` has what it logged."""

    def __init__(self, server: Server, victim: subprocess.Popen[str]) -> None:
        self.server = server
        self._victim = victim
        self.port = int(server.url.rpartition(":")[2])

    def take_victim(self) -> dict[str, Any]:
        """What has happened to the victim since the last call; see `Victim.take`."""
        assert self._victim.stdin is not None
        assert self._victim.stdout is not None
        self._victim.stdin.write("\n")
        self._victim.stdin.flush()
        taken = json.loads(self._victim.stdout.readline())
        assert isinstance(taken, dict)
        return taken

    def take_victim_later(self) -> dict[str, Any]:
        """As `take_victim`, but a pause that lasts is waited for: what a case has begun may go on when it is over."""
        taken = self.take_victim()
        deadline = time.monotonic() + _STALL_SECONDS
        while True:
            time.sleep(0.3)
            more = self.take_victim()
            for name, values in more.items():
                taken[name] += values
            if more["gaps"] or not self.runs or time.monotonic() > deadline:
                return taken

    @property
    def runs(self) -> bool:
        """Whether the front runs."""
        return self.server.process.poll() is None

    def processes(self) -> list[Process]:
        """The processes of the server, without those that may come and go."""
        children: dict[int, list[int]] = {}
        stats: dict[int, list[str]] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                stats[pid] = fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(pid)
        found, unread = [], [self.server.process.pid]
        while unread:
            pid = unread.pop()
            unread += children.get(pid, [])
            if pid in stats and stats[pid][0] != "Z":
                found.append(Process(pid, int(stats[pid][19]), _title_of(pid)))
        return [process for process in found if not process.title.startswith(SHORT_LIVED)]

    def settle(self, known: Sequence[Process] = ()) -> list[Process]:
        """Wait until the server is ready and its processes stay the same for a second; returns them.

        If they are the `known` ones, they have settled before.

        Raises:
            AssertionError: that takes too long.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        before = list(known)
        while True:
            now = self.processes() if self._is_ready() else []
            if now and now == before:
                return now
            assert time.monotonic() < deadline, f"the server does not settle\n{self.server.output[-3000:]}"
            before = now
            time.sleep(1.0)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        return False

    def send(self, cases: Sequence[Case]) -> list[Answer]:
        """Send cases from several clients at once."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(self.send_one, cases))

    def send_one(self, case: Case) -> Answer:
        """Send one case, and look at the answer."""
        if not self.runs:
            return Answer(case, 0, "the server has ended")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=case.leave_after or ANSWER_SECONDS)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a refusal may come before the end
                connection.request("POST", case.path, case.body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            problem = problem_of(response.status, response.headers, response.read(), case.path)
            return Answer(case, response.status, problem)
        except TimeoutError:
            return Answer(case, 0, "" if case.leave_after else f"no answer in {ANSWER_SECONDS:g} s")
        except (OSError, http.client.HTTPException) as error:
            return Answer(case, 0, f"no answer: {type(error).__name__}: {error}")
        finally:
            connection.close()


def _title_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").replace("\0", " ")[:200]
    return ""


def problem_of(status: int, headers: Any, body: bytes, path: str = "") -> str:
    """What is wrong with an answer of an endpoint; empty: nothing."""
    said = body[:300].decode(errors="replace")
    if status >= 500:
        later = f", Retry-After {headers['Retry-After']}" if headers.get("Retry-After") else ""
        return f"{status}{later}: {said}"
    if headers.get("Content-Type", "").startswith("text/event-stream"):
        return _problem_of_events(body)
    try:
        answer = json.loads(body)
    except ValueError:
        return f"{status} without JSON: {said}"
    if path.startswith(bodies.MESSAGES) and not path.endswith(bodies.RENDER):
        is_error = _is_error_of_anthropic(answer)
    elif path == bodies.COHERE:
        is_error = answer.keys() == {"message"} and bool(answer["message"])
    else:
        is_error = _is_error(answer)
    return "" if status == 200 or is_error else f"{status} in another shape than the API's: {said}"


def _problem_of_events(body: bytes) -> str:
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            error = event.get("error") or (event.get("response") or {}).get("error")
            if error and not {"server_error", "api_error"}.isdisjoint((error.get("type"), error.get("code"))):
                return f"an error of the server within a stream: {json.dumps(error)[:300]}"
    return ""


def _is_error_of_anthropic(answer: Any) -> bool:
    error = answer.get("error") if isinstance(answer, dict) and answer.get("type") == "error" else None
    if not isinstance(error, dict) or error.keys() != {"type", "message"}:
        return False
    return all(isinstance(text, str) and bool(text) for text in error.values())


def _is_error(answer: Any) -> bool:
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
        return False
    texts = isinstance(error["message"], str) and isinstance(error["type"], str) and bool(error["message"])
    return texts and all(isinstance(error[name], str | None) for name in ("param", "code"))


@contextlib.contextmanager
def open_site() -> Iterator[Site]:
    """A server of two replicas with little memory, which has answered some usual requests, and its victim.

    By itself, a step of 128 tokens takes a slow core less than the pause that the victim may see. Responses
    that clients ask the server to keep are no leak, so it keeps few of them.
    """
    options = (
        "-dp",
        "2",
        "--kv-cache-memory",
        "32MiB",
        "--cpu-threads",
        "1",
        "--max-num-batched-tokens",
        "128",
        "--response-store-bytes",
        "1MiB",
        "--device",
        "cpu",
        "--disable-access-log",
    )
    with serve(*options) as server:
        port = server.url.rpartition(":")[2]
        command = [sys.executable, "-m", "tests.hostile.victim", port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
            site = Site(server, victim)
            try:
                _warm_up(site)
                yield site
            finally:
                victim.kill()
                if server.process.poll() is None:
                    os.kill(server.process.pid, signal.SIGTERM)


def _warm_up(site: Site) -> None:
    """Fill pools and caches, so that memory that stays is no growth."""
    usual = [(path, bodies.usual(path)) for path in bodies.MODELS]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    prompt = {**bodies.usual(bodies.COMPLETION), "n": 64, "max_tokens": 100}
    usual += [(bodies.COMPLETION, prompt), (bodies.COMPLETION, {**prompt, "structured_outputs": {"json": schema}})]
    cases = [Case("a usual request", path, json.dumps(body).encode()) for path, body in usual] * 2
    rng = random.Random(0)
    for _ in range(_CACHED_WORDS // 1000):  # the tokenizer keeps how it has split these many words
        words = " ".join("".join(rng.choices(string.ascii_letters, k=40)) for _ in range(1000))
        cases.append(Case("new words", bodies.TOKENIZE, json.dumps({"prompt": words}).encode()))
    for answer in site.send(cases):
        assert answer.status, answer
        assert not answer.problem, answer  # 400: a model may have no embeddings
