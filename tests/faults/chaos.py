"""Faults, one after another, under streaming clients: every answer must equal that of an undisturbed run.

    python -m tests.faults.chaos --product --faults 100 --seed 1 --minutes 15 --report build/chaos.json

`--product` causes every fault in every process, idle, loading and busy; then `--faults` faults follow at random, most
of them kills. The server runs two replicas of two stages, each on a host of its own (a network namespace). The log must
name each fault in time, both replicas must run again, and all streams must go on, before the next fault. A run with
`--report` goes on behind the faults that its file has, so hours of faults need not be spent at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.faults.chaos_clients import REQUESTS, UNSEEDED, Busy, Failed, ask, connect
from tests.faults.chaos_faults import PRODUCT, STALLING, Fault, Faults
from tests.faults.site import Site, await_line

LAYOUT = ("-dp", "2", "-pp", "2")
_LONG_SHARE = 0.22
"""Of faults at random, the share of those that wait for a deadline: 17 of each kind in 1,000 faults."""
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
    given_up: int = 0
    """Requests that ended with an error, since they were alone when a replica failed that they had seen fail before."""
    late: list[str] = field(default_factory=list)
    """Faults that were named or over later than promised. Test machines with few cores may be slow."""
    seconds: float = 0.0
    """How long all faults took."""
    tried: int = 0
    """Faults or pairs that were caused, or should have been."""
    left: int = 0
    """How many of the run's faults are still to be caused."""
    commits: list[str] = field(default_factory=list)
    """The states of the tree that were tested, the oldest first."""

    @classmethod
    def load(cls, path: Path) -> Report:
        """The report of the runs so far; an empty one if there was none."""
        report = cls()
        if path.exists():
            for name, value in json.loads(path.read_text()).items():
                times = defaultdict(list, value) if isinstance(value, dict) else value
                setattr(report, name, times)
        return report

    def save(self, path: Path) -> None:
        """Keep it for the next run. The file is whole at any time."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(vars(self)))
        part.replace(path)

    def lines(self) -> list[str]:
        """A table of the times in Markdown, and the verdict."""
        names = sorted({key.rpartition(", ")[0] for key in self.named})
        rows = [
            "| fault | faults | named | streams go on | all replicas run again |",
            "|---|---|---|---|---|",
            *map(self._row, names),
            "",
            "Seconds, median / largest of all states; the largest of idle, loading and busy apart:",
            "",
            *(f"- {name}: {self._by_state(name)}" for name in names),
            "",
            f"{self.num_faults} faults in {self.seconds / 60:.1f} minutes; {self.answers} answers compared, "
            f"{len(self.wrong)} errors, {len(self.late)} later than promised; {self.given_up} requests were alone at "
            "a second failure, and ended with an error, as they must",
            *(f"Tested: {', '.join(self.commits)}" for _ in self.commits[:1]),
            *(f"LATE  {line}" for line in self.late[:40]),
            *(f"WRONG {line}" for line in self.wrong[:40]),
        ]
        notes = f", {self.left} faults are left" * bool(self.left) + f", {len(self.late)} late" * bool(self.late)
        return [*rows, ("FAILED" if self.wrong else "PASSED") + notes]

    @property
    def num_faults(self) -> int:
        """How many faults were caused."""
        return sum(map(len, self.named.values()))

    def _row(self, name: str) -> str:
        """The row of a fault."""
        kinds = [
            [seconds for key, times in kind.items() if key.startswith(f"{name}, ") for seconds in times]
            for kind in (self.named, self.paused, self.recovered)
        ]
        cells = [f"{statistics.median(times):.1f} / {max(times):.1f}" if times else "-" for times in kinds]
        return f"| {name} | {len(kinds[0])} | {' | '.join(cells)} |"

    def _by_state(self, name: str) -> str:
        words = []
        for state in ("idle", "loading", "busy"):
            kinds = {"named": self.named, "go on": self.paused, "run again": self.recovered}
            largest = {word: max(kind.get(f"{name}, {state}", [0.0])) for word, kind in kinds.items()}
            if f"{name}, {state}" in self.named:
                words.append(f"{state} " + ", ".join(f"{word} {seconds:.1f}" for word, seconds in largest.items()))
        return "; ".join(words)


class AnyFault(Protocol):
    """What is caused at once; see `chaos_faults.Fault`."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def runs_within(self) -> float: ...


class Chaos:
    """A server, its clients, and the faults."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        layout: Sequence[str] = LAYOUT,
        pause: float = 0.0,
        shm: str = "",
    ) -> None:
        """`layout`: flags of the server. `pause`: seconds that a client waits after each answer. `shm`: see `Hosts`."""
        self._pause = pause
        self._random = random.Random(seed)
        self.report = Report()
        self._stopping = threading.Event()
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._running = 0
        self._longest_pause = 0.0
        """Seconds for which a stream got nothing, since the last fault."""
        self._waiting: dict[int, float] = {}
        """For each thread in the middle of a stream, when its last piece came."""
        self._last_piece = 0.0
        self._begun = 0
        """Faults so far that may have ended an engine."""
        self._over = 0
        """How many of them no later request can have met: they were named."""
        path = f"{STALLING}:{os.environ.get('PYTHONPATH', '')}"
        flags = (*layout, "--max-restarts", "1000000", "--max-num-seqs", "16")
        self.site = Site(folder, 2, *flags, shm=shm, PYTHONPATH=path)
        self._client = connect(self.site.url)
        self._faults = Faults(self.site, self._random)
        self._expected: list[str] = []

    def run(
        self, faults: Sequence[AnyFault], num_clients: int = 4, seconds: float = 1e9, kept: Path | None = None
    ) -> Report:
        """Cause faults for at most so many seconds, and return what happened.

        `kept`: a file with the report of earlier runs of the same faults. It is written after each fault, and the
        faults that it has are not caused again.
        """
        if kept is not None:
            self.report = Report.load(kept)
            self.report.commits = list(dict.fromkeys([*self.report.commits, _commit()]))
        before, done = self.report.seconds, self.report.tried
        self.report.left = len(faults) - done
        try:
            self.site.await_ready()
            self._expected = [self._answer(request) for request in REQUESTS]
            self._waiting.clear()
            clients = [threading.Thread(target=self._be_client, args=(index,)) for index in range(num_clients)]
            for client in clients:
                client.start()
            began = time.monotonic()
            for number, fault in enumerate(faults[done:], done + 1):
                if time.monotonic() - began > seconds or not self._cause_fault(fault):
                    break
                self.report.seconds = before + time.monotonic() - began
                self.report.tried, self.report.left = number, len(faults) - number
                self._show_progress(number, len(faults))
                if kept is not None:
                    self.report.save(kept)
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

    def _show_progress(self, number: int, count: int) -> None:
        """One line that is overwritten, and one that stays after every 50 faults."""
        report = self.report
        left = report.seconds / number * report.left / 60
        print(
            f"{number}/{count} faults, {report.answers} answers, {len(report.wrong)} errors, {len(report.late)} late, "
            f"{report.seconds / 60:.1f} minutes, about {left:.1f} left ",
            end="\n" if number % 50 == 0 else "\r",
            file=sys.stderr,
            flush=True,
        )

    def check_end(self) -> None:
        """End the server: no process may be left on any host."""
        self.site.head.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while left := [pid for host in range(2) for pid in self.site.hosts.pids(host)]:
            if time.monotonic() > deadline:
                self.report.wrong.append(f"processes are left at the end: {left}")
                return
            time.sleep(0.1)

    def _cause_fault(self, fault: Any) -> bool:
        """Cause a fault and wait until all is well again; False: it will not be."""
        if fault.state == "idle":
            self._flowing.clear()
            while self._running:
                time.sleep(0.02)
        else:
            self._flowing.set()
            self._await_streams(fault)
        time.sleep(0.15 * self._random.random())
        self._longest_pause = 0.0
        if fault.state == "loading":
            self._begun += 1
            if not self._faults.await_loading():
                self.report.wrong.append(f"no process was loading for {fault.name}")
                return self._await_replicas(fault, time.monotonic())
            self._over = self._begun
        began = time.monotonic()
        self._begun += 1
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
        self._over = self._begun
        bring_back()
        return self._await_replicas(fault, began)

    def _await_replicas(self, fault: AnyFault, began: float) -> bool:
        while (seconds := time.monotonic() - began) < _LOST_AFTER:
            try:
                health = httpx.get(f"{self.site.url}/health", timeout=5.0).json()
            except httpx.HTTPError:
                health = {"status": "away"}
            if health["status"] == "ready" and "replicas" not in health:
                self.report.recovered[f"{fault.name}, {fault.state}"].append(seconds)
                if fault.state != "idle":
                    self._await_streams(fault)
                    self._note_pause(fault)
                return True
            time.sleep(0.05)
        self.report.wrong.append(f"after {fault.name}, {fault.state}, not all replicas ran again: {health}")
        for log in self.site.logs:
            print(f"--- {log.name}\n{log.read_text()[-6000:]}", file=sys.stderr)
        return False

    def _await_streams(self, fault: AnyFault) -> None:
        """Wait until tokens come, in all streams that have begun."""
        now = time.monotonic()
        while self._last_piece <= now or min(list(self._waiting.values()), default=now + 1) <= now:
            if time.monotonic() - now > fault.runs_within:
                self.report.wrong.append(f"at {fault.name}, {fault.state}, streams do not go on")
                return
            time.sleep(0.02)

    def _note_pause(self, fault: AnyFault) -> None:
        """Keep for how long streams paused. All of them go on by now."""
        pause = self._longest_pause
        self.report.paused[f"{fault.name}, {fault.state}"].append(pause)
        if pause > fault.runs_within:
            self.report.late.append(f"{fault.name}, {fault.state}: a stream paused for {pause:.1f} s")

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
            over = self._over
            self._count(1)
            try:
                if number == len(REQUESTS):
                    answer = self._answer(UNSEEDED)
                    right = json.loads(answer)["usage"]["completion_tokens"] == UNSEEDED["max_tokens"]
                else:
                    answer = self._answer(REQUESTS[number])
                    right = answer == self._expected[number]
            except Busy:
                time.sleep(0.2)
                continue
            except Failed as error:
                if "and alone at this one" in str(error) and self._begun - over >= 2:
                    self.report.given_up += 1
                    continue
                self.report.wrong.append(f"request {number}: {error}")
                continue
            finally:
                self._waiting.pop(threading.get_ident(), None)
                self._count(-1)
            self.report.answers += 1
            if not right:
                self.report.wrong.append(f"request {number} has another answer: {self._difference(number, answer)}")
            self._stopping.wait(self._pause)

    def _count(self, change: int) -> None:
        with self._lock:
            self._running += change

    def _answer(self, request: dict[str, Any]) -> str:
        """The answer to a request; see `ask`. The pauses of its stream are noted."""
        last = time.monotonic()

        def note_piece() -> None:
            nonlocal last
            now = time.monotonic()
            self._longest_pause = max(self._longest_pause, now - last)
            last = self._last_piece = self._waiting[threading.get_ident()] = now

        return ask(self._client, request, note_piece)


def _commit() -> str:
    """The state of the tree."""
    words = ("git", "describe", "--always", "--dirty")
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


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
    """Faults in random order. Most are over in a second; each of the others comes equally often.

    Hangs that take a minute are left out.
    """
    usable = [fault for fault in known if not fault.hangs_while_loading] or known
    short = [fault for fault in usable if fault.is_short]
    long = [fault for fault in usable if not fault.is_short]
    names = sorted({fault.name for fault in long})
    num_long = count if not short else round(_LONG_SHARE * count) if long else 0
    chosen = chooser.choices(short, k=count - num_long) if short else []
    for number in range(num_long):
        name = names[number % len(names)]
        chosen.append(chooser.choice([fault for fault in long if fault.name == name]))
    chooser.shuffle(chosen)
    return chosen


def main() -> int:
    """Run the faults that the arguments ask for, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", action="store_true", help="first, every fault in every process and state")
    parser.add_argument("--faults", type=int, default=0, help="faults at random")
    parser.add_argument("--first", type=int, default=1, help="number of the first fault; those before ran elsewhere")
    parser.add_argument("--only", default="", help="only faults whose words contain this, for example 'stall head'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="cause no new fault after this time")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the logs of the hosts")
    parser.add_argument("--report", type=Path, help="a file by which a run goes on where the last one stopped")
    parser.add_argument("--clients", type=int, default=4, help="streams at a time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a client after each answer")
    parser.add_argument("--layout", default="-dp 2 -pp 2", help="of the server, on two hosts")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no host is left behind
    chooser = random.Random(arguments.seed)
    known = [fault for fault in PRODUCT if arguments.only in f"{fault.name} {fault.state}"]
    faults = [*(known if arguments.product else ()), *choose_faults(known, arguments.faults, chooser)]
    faults = faults[arguments.first - 1 :]
    if arguments.report and (report := Report.load(arguments.report)).tried >= len(faults):
        print(
            f"{arguments.report} has all of these faults; without it they are caused again", *report.lines(), sep="\n"
        )
        return 1 if report.wrong else 0
    if arguments.product and arguments.first == 1:
        with tempfile.TemporaryDirectory() as folder:
            print(check_wrong_interface(Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(arguments.logs or Path(folder), arguments.seed, arguments.layout.split(), arguments.pause)
        try:
            chaos.run(faults, arguments.clients, 60 * arguments.minutes, arguments.report)
        except (KeyboardInterrupt, SystemExit):
            chaos.report.wrong.append("interrupted")
    print("\n".join(chaos.report.lines()))
    return 1 if chaos.report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
