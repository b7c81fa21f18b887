"""Faults, one after another, under streaming clients: every answer must equal that of an undisturbed run.

    python -m tests.faults.chaos --product --faults 100 --seed 1 --minutes 15

`--product` causes every fault in every process, idle, loading and busy; then `--faults` faults follow at random. The
server runs two replicas of two stages, each on a host of its own (a network namespace). The log must name each fault in
time, and both replicas must run again before the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.chaos_faults import PRODUCT, STALLING, Fault, Faults
from tests.faults.site import Site, await_line

_TEXT = {"model": "demo", "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
REQUESTS: tuple[dict[str, Any], ...] = (
    {**_TEXT, "prompt": "The first thing that", "max_tokens": 300, "temperature": 0.8, "seed": 7},
    {**_TEXT, "prompt": "In the morning", "max_tokens": 120, "n": 2, "seed": 3, "logprobs": 2},
    {**_TEXT, "prompt": "A list of", "max_tokens": 200, "temperature": 0, "frequency_penalty": 0.5},
    {**_TEXT, "prompt": "She said", "max_tokens": 250, "seed": 11, "stop": ["zz", "qu"], "ignore_eos": False},
)
UNSEEDED = {**_TEXT, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 1.0}

_PAUSE = 0.3
"""Seconds without a piece that count as a pause of a stream."""
_LOST_AFTER = 150.0
"""Seconds after which replicas count as lost for good."""


@dataclass
class Report:
    """What happened."""

    named: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    paused: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The longest pause of any stream after each fault."""
    recovered: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: int = 0
    wrong: list[str] = field(default_factory=list)

    late: list[str] = field(default_factory=list)
    """Faults that were named or over later than promised. Test machines with few cores may be slow."""

    def lines(self) -> list[str]:
        """A table of the times, for people."""
        kinds = {
            "named": self.named,
            "streams go on": self.paused,
            "all run again": self.recovered,
        }
        rows = [f"{'fault':<24}{'n':>5}" + "".join(f"{name + ' s':>18}" for name in kinds) + "    (median / largest)"]
        for name in sorted(self.named):
            cells = [
                f"{statistics.median(times[name]):.1f} / {max(times[name]):.1f}" if times[name] else "-"
                for times in kinds.values()
            ]
            rows.append(f"{name:<24}{len(self.named[name]):>5}" + "".join(f"{cell:>18}" for cell in cells))
        faults = sum(map(len, self.named.values()))
        rows.append(f"{faults} faults; {self.answers} answers compared, {len(self.wrong)} wrong")
        rows.append(f"later than promised: {len(self.late)}")
        return [*rows, *self.late[:20], *self.wrong[:20]]


class Chaos:
    """A server, its clients, and the faults."""

    def __init__(self, folder: Path, seed: int, layout: Sequence[str] = ("-dp", "2", "-pp", "2")) -> None:
        self._random = random.Random(seed)
        self.report = Report()
        self._stopping = threading.Event()
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._running = 0
        self._pauses: list[tuple[float, float]] = []
        """When a stream went on, and for how long it had paused."""
        self._waiting: dict[int, float] = {}
        """For each thread in the middle of a stream, when its last piece came."""
        path = f"{STALLING}:{os.environ.get('PYTHONPATH', '')}"
        flags = (*layout, "--max-restarts", "1000000", "--max-num-seqs", "16")
        self.site = Site(folder, 2, *flags, PYTHONPATH=path)
        self._faults = Faults(self.site, self._random)
        self._expected: list[str] = []

    def run(self, faults: Sequence[Fault], num_clients: int = 4, seconds: float = 1e9) -> Report:
        """Cause faults for at most so many seconds, and return what happened."""
        try:
            self.site.await_ready()
            self._faults.await_fork_servers()
            self._expected = [self._answer(request) for request in REQUESTS]
            clients = [threading.Thread(target=self._be_client, args=(index,)) for index in range(num_clients)]
            for client in clients:
                client.start()
            began = time.monotonic()
            for number, fault in enumerate(faults):
                if time.monotonic() - began > seconds or not self._cause_fault(fault):
                    break
                print(f"{number + 1}/{len(faults)} faults, {self.report.answers} answers", end="\r", file=sys.stderr)
            self._stopping.set()
            self._flowing.set()
            for client in clients:
                client.join(90.0)
                if client.is_alive():
                    self.report.wrong.append("a client hangs")
            self.check_end()
            return self.report
        finally:
            self._stopping.set()
            self._flowing.set()
            self.site.hosts.close()

    def check_end(self) -> None:
        """End the server: no process may be left on any host."""
        self.site.head.terminate()
        deadline = time.monotonic() + 20
        while left := [pid for host in range(2) for pid in self.site.hosts.pids(host)]:
            if time.monotonic() > deadline:
                self.report.wrong.append(f"processes are left at the end: {left}")
                return
            time.sleep(0.1)

    def _cause_fault(self, fault: Fault) -> bool:
        """Cause a fault and wait until all is well again; False: it will not be."""
        if fault.state == "idle":
            self._flowing.clear()
            while self._running:
                time.sleep(0.05)
        else:
            self._flowing.set()
        if fault.state == "loading" and not self._faults.await_loading():
            self.report.wrong.append(f"no process was loading for {fault.name}")
            return self._await_replicas(fault, time.monotonic())
        began = time.monotonic()
        is_named, bring_back = self._faults.cause(fault)
        while not is_named():
            if time.monotonic() - began > 2 * fault.named_within + 2:
                self.report.wrong.append(f"{fault.name}, {fault.state}, was not named")
                break
            time.sleep(0.02)
        seconds = time.monotonic() - began
        self.report.named[f"{fault.name}, {fault.state}"].append(seconds)
        if seconds > fault.named_within:
            self.report.late.append(f"{fault.name}, {fault.state}: named after {seconds:.1f} s")
        bring_back()
        return self._await_replicas(fault, began)

    def _await_replicas(self, fault: Fault, began: float) -> bool:
        while (seconds := time.monotonic() - began) < _LOST_AFTER:
            try:
                health = httpx.get(f"{self.site.url}/health", timeout=5.0).json()
            except httpx.HTTPError:
                health = {"status": "away"}
            if health["status"] == "ready" and "replicas" not in health:
                self.report.recovered[f"{fault.name}, {fault.state}"].append(seconds)
                time.sleep(0.2 + 0.5 * self._random.random())
                self._note_pauses(fault, began)
                return True
            time.sleep(0.1)
        self.report.wrong.append(f"after {fault.name}, {fault.state}, not all replicas ran again: {health}")
        for log in self.site.logs:
            print(f"--- {log.name}\n{log.read_text()[-6000:]}", file=sys.stderr)
        return False

    def _note_pauses(self, fault: Fault, began: float) -> None:
        """Keep for how long streams paused since `began`; those that still wait count too."""
        now = time.monotonic()
        pauses = [length for end, length in self._pauses if end > began]
        pauses += [now - last for last in list(self._waiting.values()) if now - last > _PAUSE]
        self._pauses.clear()
        if not pauses:
            return
        self.report.paused[f"{fault.name}, {fault.state}"].append(max(pauses))
        if max(pauses) > fault.runs_within:
            self.report.late.append(f"{fault.name}, {fault.state}: a stream paused for {max(pauses):.1f} s")

    def _difference(self, number: int, answer: str) -> str:
        """The first place in which an answer differs from the expected one."""
        if number == len(REQUESTS):
            return answer[-200:]
        expected = self._expected[number]
        place = next((i for i, pair in enumerate(zip(answer, expected, strict=False)) if len(set(pair)) > 1), 0)
        return f"at {place}: {answer[place - 40 : place + 40]!r}, expected {expected[place - 40 : place + 40]!r}"

    def _be_client(self, index: int) -> None:
        chooser = random.Random(index)
        while not self._stopping.is_set():
            number = chooser.randrange(len(REQUESTS) + 1)
            self._flowing.wait()
            self._count(1)
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
            finally:
                self._count(-1)
            self.report.answers += 1
            if not right:
                self.report.wrong.append(f"request {number} has another answer: {self._difference(number, answer)}")

    def _count(self, change: int) -> None:
        with self._lock:
            self._running += change

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
                now = time.monotonic()
                if now - last > _PAUSE:
                    self._pauses.append((now, now - last))
                last = self._waiting[threading.get_ident()] = now
                usage = piece.get("usage") or usage
                for choice in piece["choices"]:
                    found = choices[choice["index"]]
                    found["text"] += choice["text"]
                    found["finish"] = choice["finish_reason"] or found["finish"]
                    if choice.get("logprobs"):
                        found["logprobs"] += choice["logprobs"]["token_logprobs"]
        self._waiting.pop(threading.get_ident(), None)
        if usage is None:
            raise _Failed("the stream ended early")
        return json.dumps({"choices": choices, "usage": usage}, sort_keys=True)


class _Busy(Exception):
    """The server takes no requests at present."""


class _Failed(Exception):
    """A stream ended with an error."""


def check_wrong_interface(folder: Path) -> str:
    """A node has an address that the others cannot reach: which line says so, and how the server ends, for people."""
    wrong = "10.99.0.1"
    flags = ("-tp", "3", "--distributed-timeout-seconds", "10")
    site = Site(folder, 3, *flags, started=1)
    try:
        site.hosts.add_address(1, wrong)
        began = time.monotonic()
        site.start_node(1, SHARDLINE_HOST_IP=wrong)
        site.start_node(2)
        seconds = await_line(site, rf"ERROR .*cannot reach node 1 \(\S+ {wrong}\)", 30.0)
        code = site.head.wait(60.0)
        ended = time.monotonic() - began
        return f"wrong interface: named after {seconds:.1f} s; the server ended with code {code} after {ended:.1f} s"
    finally:
        site.hosts.close()


def choose_faults(known: Sequence[Fault], count: int, chooser: random.Random) -> list[Fault]:
    """Faults at random. Kills, which are over soonest, are most of them; hangs that take a minute are left out."""
    quick = [fault for fault in known if not fault.hangs_while_loading] or known
    return chooser.choices(quick, [4 if fault.kind == "kill" else 1 for fault in quick], k=count)


def main() -> int:
    """Run the faults that the arguments ask for, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", action="store_true", help="first, every fault in every process and state")
    parser.add_argument("--faults", type=int, default=0, help="faults at random")
    parser.add_argument("--only", default="", help="only faults whose words contain this, for example 'stall head'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="cause no new fault after this time")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the logs of the hosts")
    parser.add_argument("--layout", default="-dp 2 -pp 2", help="of the server, on two hosts")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no host is left behind
    chooser = random.Random(arguments.seed)
    known = [fault for fault in PRODUCT if arguments.only in f"{fault.name} {fault.state}"]
    faults = [*(known if arguments.product else ()), *choose_faults(known, arguments.faults, chooser)]
    if arguments.product:
        with tempfile.TemporaryDirectory() as folder:
            print(check_wrong_interface(Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(arguments.logs or Path(folder), arguments.seed, arguments.layout.split())
        report = chaos.run(faults, seconds=60 * arguments.minutes)
    print("\n".join(report.lines()))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
