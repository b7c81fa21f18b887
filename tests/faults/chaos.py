"""Faults at random, one after another, under streaming clients: every answer must equal that of an undisturbed run.

    python -m tests.faults.chaos --faults 100 --seed 1

The server runs two replicas of two stages, each on a host of its own (a network namespace). After each fault it must
name the fault in time, and both replicas must run again before the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.site import Site

_TEXT = {"model": "demo", "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
REQUESTS: tuple[dict[str, Any], ...] = (
    {**_TEXT, "prompt": "The first thing that", "max_tokens": 300, "temperature": 0.8, "seed": 7},
    {**_TEXT, "prompt": "In the morning", "max_tokens": 120, "n": 2, "seed": 3, "logprobs": 2},
    {**_TEXT, "prompt": "A list of", "max_tokens": 200, "temperature": 0, "frequency_penalty": 0.5},
    {**_TEXT, "prompt": "She said", "max_tokens": 250, "seed": 11, "stop": ["zz", "qu"], "ignore_eos": False},
)
UNSEEDED = {**_TEXT, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 1.0}

NAMED_WITHIN = {"kill": 1.0, "stop": 5.0, "cut": 6.0}
"""Seconds from a fault to the line of the log that names it. A test machine with few cores may take as much again."""
RUNS_WITHIN = 40.0
KINDS = ("kill rank", "kill engine", "kill head", "kill node", "stop rank", "stop engine", "cut")


@dataclass
class Report:
    """What happened."""

    named: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recovered: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: int = 0
    gap: float = 0.0
    """The longest pause in a stream, in seconds."""
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """A table of the times, for people."""
        rows = [f"{'fault':<14}{'n':>5}{'named s':>16}{'runs again s':>16}"]
        for kind in sorted(self.named):
            cells = [
                f"{statistics.median(times):.1f} / {max(times):.1f}" if times else "-"
                for times in (self.named[kind], self.recovered[kind])
            ]
            rows.append(f"{kind:<14}{len(self.named[kind]):>5}{cells[0]:>16}{cells[1]:>16}")
        rows.append(f"{self.answers} answers compared, {len(self.wrong)} wrong; longest pause {self.gap:.1f} s")
        return [*rows, *self.wrong[:5]]


class Chaos:
    """A server, its clients, and the faults."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self.report = Report()
        self._stopping = threading.Event()
        flags = ("-dp", "2", "-pp", "2", "--max-restarts", "1000000", "--max-num-seqs", "16")
        self.site = Site(folder, 2, *flags)
        self._expected: list[str] = []

    def run(self, num_faults: int, num_clients: int = 4) -> Report:
        """Cause faults, and return what happened."""
        try:
            self.site.await_ready()
            self._expected = [self._answer(request) for request in REQUESTS]
            clients = [threading.Thread(target=self._be_client, args=(index,)) for index in range(num_clients)]
            for client in clients:
                client.start()
            for number in range(num_faults):
                self._cause_fault()
                print(f"{number + 1}/{num_faults} faults, {self.report.answers} answers", end="\r", file=sys.stderr)
            self._stopping.set()
            for client in clients:
                client.join(90.0)
                if client.is_alive():
                    self.report.wrong.append("a client hangs")
            return self.report
        finally:
            self._stopping.set()
            self.site.hosts.close()

    def _cause_fault(self) -> None:
        kind = self._random.choice(KINDS)
        lines = self._error_lines()
        began = time.monotonic()
        if kind == "cut":
            self.site.hosts.cut(1)
        elif kind == "kill node":
            os.killpg(self.site.nodes[0].pid, signal.SIGKILL)
        else:
            how, title = kind.split()
            pids = self._titled(title)
            number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), number)
        # A node that is gone is noticed as one that is cut off.
        allowed = NAMED_WITHIN["cut" if kind == "kill node" else kind.split()[0]]
        while self._error_lines() == lines:
            if time.monotonic() - began > 2 * allowed + 1:
                self.report.wrong.append(f"{kind} was not named within {2 * allowed + 1:g} s")
                break
            time.sleep(0.02)
        self.report.named[kind].append(time.monotonic() - began)
        if kind == "cut":
            self.site.hosts.heal(1)
        elif kind == "kill node":
            self.site.nodes[0] = self.site.start_node(1)
        self._await_replicas(kind, began)

    def _await_replicas(self, kind: str, began: float) -> None:
        while time.monotonic() - began < RUNS_WITHIN:
            with contextlib.suppress(httpx.HTTPError):
                health = httpx.get(f"{self.site.url}/health", timeout=5.0).json()
                if health["status"] == "ready" and "replicas" not in health:
                    self.report.recovered[kind].append(time.monotonic() - began)
                    time.sleep(self._random.random())
                    return
            time.sleep(0.1)
        self.report.wrong.append(f"after {kind} not all replicas ran again within {RUNS_WITHIN:g} s")

    def _difference(self, number: int, answer: str) -> str:
        """The first place in which an answer differs from the expected one."""
        if number == len(REQUESTS):
            return answer[-200:]
        expected = self._expected[number]
        place = next((i for i, pair in enumerate(zip(answer, expected, strict=False)) if len(set(pair)) > 1), 0)
        return f"at {place}: {answer[place - 40 : place + 40]!r}, expected {expected[place - 40 : place + 40]!r}"

    def _error_lines(self) -> int:
        return len(re.findall(r"ERROR", self.site.log()))

    def _titled(self, title: str) -> list[int]:
        """The processes whose title begins with this word."""
        found = []
        for host in range(2):
            for pid in self.site.hosts.pids(host):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"shardline: {title}".encode()):
                        found.append(pid)
        return found

    def _be_client(self, index: int) -> None:
        chooser = random.Random(index)
        while not self._stopping.is_set():
            number = chooser.randrange(len(REQUESTS) + 1)
            try:
                if number == len(REQUESTS):
                    answer = self._answer(UNSEEDED)
                    right = json.loads(answer)["usage"]["completion_tokens"] == UNSEEDED["max_tokens"]
                else:
                    answer = self._answer(REQUESTS[number])
                    right = answer == self._expected[number]
            except _Busy:
                time.sleep(0.2)
                continue
            except (httpx.HTTPError, _Failed) as error:
                self.report.wrong.append(f"request {number}: {type(error).__name__}: {error}")
                continue
            self.report.answers += 1
            if not right:
                self.report.wrong.append(f"request {number} has another answer: {self._difference(number, answer)}")

    def _answer(self, request: dict[str, Any]) -> str:
        """The whole answer to a request as text, in a form that does not depend on how it was cut into pieces.

        Raises:
            _Busy: no replica ran when the request came.
            _Failed: the stream ended with an error.
        """
        choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": [], "finish": None})
        usage, last = None, time.monotonic()
        with httpx.stream("POST", f"{self.site.url}/v1/completions", json=request, timeout=60.0) as response:
            if response.status_code in (429, 503):
                raise _Busy
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    raise _Failed(str(piece["error"]))
                self.report.gap = max(self.report.gap, time.monotonic() - last)
                last = time.monotonic()
                usage = piece.get("usage") or usage
                for choice in piece["choices"]:
                    found = choices[choice["index"]]
                    found["text"] += choice["text"]
                    found["finish"] = choice["finish_reason"] or found["finish"]
                    if choice.get("logprobs"):
                        found["logprobs"] += choice["logprobs"]["token_logprobs"]
        if usage is None:
            raise _Failed("the stream ended early")
        return json.dumps({"choices": choices, "usage": usage}, sort_keys=True)


class _Busy(Exception):
    """The server takes no requests at present."""


class _Failed(Exception):
    """A stream ended with an error."""


def main() -> int:
    """Run the faults that the arguments ask for, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Chaos(Path(folder), arguments.seed).run(arguments.faults)
    print("\n".join(report.lines()))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
