"""Hostile requests against a live server: nothing ends, nothing is a 5xx, and an innocent client notices nothing.

    python -m tests.hostile.run --cases 10000 --seed 0
    python -m tests.hostile.run --number 4711           # one case of the seed

A batch of cases after which a process has ended, or in which the victim was paused, is sent again in halves until the
guilty case is found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.hostile import connections
from tests.hostile.bodies import Case, drawn_case, named_cases
from tests.hostile.site import Answer, Process, Site, open_site
from tests.hostile.victim import MAX_TOKENS

USUAL_PAUSE, LONGEST_PAUSE = 0.05, 0.1
"""Seconds between two parts of the victim's stream: at the 99th percentile, and at most."""
MEMORY_GROWTH = 0.2
"""How much a process may have grown afterwards, as a part of all the memory that it had."""
_MEMORY_SECONDS = 60.0
_BATCH = 48
_QUIET_SECONDS = 5.0


@dataclass
class Found:
    """What a run has found. All lists of texts are empty if the server is as it must be."""

    answers: dict[int, int] = field(default_factory=dict)
    """How many answers had each status; 0: the client has left."""
    ended: list[str] = field(default_factory=list)
    """Processes that have ended, and the batch or the case that did it."""
    wrong: list[str] = field(default_factory=list)
    """Answers of the server's errors, missing answers, and answers in another shape."""
    pauses: list[str] = field(default_factory=list)
    harm: list[str] = field(default_factory=list)
    """What else the victim noticed."""
    memory: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def failures(self, slack: float = 1.0) -> list[str]:
        """What is wrong; the victim's pauses may be `slack` times as long as they must be."""
        usual, longest = _pauses(self.gaps)
        late = []
        if usual > USUAL_PAUSE * slack or longest > LONGEST_PAUSE * slack:
            late = [f"the victim's pauses: {self.describe_pauses()}", *self.pauses]
        return [*self.ended, *self.wrong, *late, *self.harm, *self.memory, *self.tracebacks]

    def describe_pauses(self) -> str:
        """The victim's pauses beside the cases, and in the quiet run before."""
        texts = [
            f"{1e3 * usual:.0f} ms (p99), {1e3 * longest:.0f} ms (most)"
            for usual, longest in map(_pauses, (self.gaps, self.quiet))
        ]
        return f"{texts[0]}; in the quiet run {texts[1]}"


def _pauses(gaps: Sequence[float]) -> tuple[float, float]:
    """The 99th percentile and the longest."""
    ordered = sorted(gaps) or [0.0]
    return ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def _steady_memory(processes: Sequence[Process]) -> dict[Process, int]:
    """The memory of each process, once none grows any more: some import modules after the server is ready."""
    deadline = time.monotonic() + _MEMORY_SECONDS
    before = {process: process.memory for process in processes}
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = {process: process.memory for process in processes}
        if all(memory - before[process] < 1 << 20 for process, memory in now.items()):
            return now
        before = now
    return before


class Run:
    """One run over cases; it starts a new server whenever one has ended."""

    def __init__(self, slack: float, batch: int = _BATCH) -> None:
        self.found = Found()
        self._slack = slack
        self._batch = batch
        self._tokens: list[int] = []
        """Those of the victim's stream."""
        self._processes: list[Process] = []

    def run(self, cases: Sequence[Case]) -> Found:
        """Send all cases, and open hostile connections."""
        connecting = True
        batches = [cases[start : start + self._batch] for start in range(0, len(cases), self._batch)]
        while batches:
            with self._site() as (site, processes):
                baseline = _steady_memory(processes)
                while batches and site.runs:
                    known = self.found.failures(self._slack)
                    self._send(site, batches.pop(0))
                    failures = self.found.failures(self._slack)
                    print(f"{len(batches)} batches left, {len(failures)} failures", file=sys.stderr, flush=True)
                    for failure in failures:
                        if failure not in known:
                            print(failure[:300], file=sys.stderr, flush=True)
                if site.runs and connecting:
                    self._connect(site)
                    connecting = False
                if site.runs:
                    self._check_memory(site, baseline)
                self._read_log(site)
        return self.found

    @contextlib.contextmanager
    def _site(self) -> Iterator[tuple[Site, list[Process]]]:
        with open_site() as site:
            site.take_victim()
            gaps: list[float] = []
            deadline = time.monotonic() + _QUIET_SECONDS
            while time.monotonic() < deadline or not self._tokens:
                time.sleep(0.25)
                assert time.monotonic() < deadline + 60.0, "the victim's stream does not end"
                taken = site.take_victim()
                assert not taken["errors"], taken["errors"]
                gaps += taken["gaps"]
                whole = [tokens for tokens in taken["tokens"] if len(tokens) == MAX_TOKENS]
                self._tokens = self._tokens or (whole[0] if whole else [])
            self.found.quiet += gaps
            yield site, site.settle()

    def _send(self, site: Site, batch: Sequence[Case]) -> None:
        """Send a batch, and blame the guilty cases."""
        before = self._processes = site.settle(self._processes)
        site.take_victim()
        answers = site.send(batch)
        self._count(answers)
        ended, late = self._look(site, before)
        if ended or late:
            guilty = self._shrink(batch)
            names = "; ".join(f"{case}, {case.body[:200]!r}" for case in guilty[:3])
            blame = (
                f"{len(guilty)} case(s): {names}"
                if len(guilty) < len(batch)
                else f"a batch that begins with {batch[0]}"
            )
            (self.found.ended if ended else self.found.pauses).append(f"{ended or late} after {blame}")

    def _connect(self, site: Site) -> None:
        """Hostile connections, one kind after another."""
        for act in connections.ALL:
            before = self._processes = site.settle(self._processes)
            site.take_victim()
            problem = act(site.port)
            ended, late = self._look(site, before)
            name = act.__name__.replace("_", " ")
            self.found.wrong += [problem] if problem else []
            self.found.ended += [f"{ended} after {name}"] if ended else []
            self.found.pauses += [f"{late} after {name}"] if late else []

    def _count(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.found.answers[answer.status] = self.found.answers.get(answer.status, 0) + 1
            if answer.problem:
                self.found.wrong.append(f"{answer.case}: {answer.problem}")

    def _look(self, site: Site, before: Sequence[Process]) -> tuple[str, str]:
        """Which processes have ended since, and how late the victim was; empty: none, and not too late."""
        taken = site.take_victim_later()
        now = site.processes()
        ended = [process.title for process in before if process not in now]
        self.found.gaps += taken["gaps"]
        self._check_victim(taken)
        longest = max(taken["gaps"], default=0.0)
        late = f"a pause of {1e3 * longest:.0f} ms" if longest > LONGEST_PAUSE * self._slack else ""
        return (f"ended: {', '.join(ended)}" if ended else ""), late

    def _check_victim(self, taken: dict[str, Any]) -> None:
        self.found.harm += taken["errors"]
        for tokens in taken["tokens"]:
            if tokens != self._tokens[: len(tokens)]:
                self.found.harm.append("the victim's tokens are not those of the quiet run")

    def _shrink(self, batch: Sequence[Case]) -> Sequence[Case]:
        """The smallest part of a batch that does it again; the batch itself if no half does."""
        while len(batch) > 1:
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                if self._harms(half):
                    batch = half
                    break
            else:
                return batch
        return batch

    def _harms(self, cases: Sequence[Case]) -> bool:
        """Whether cases harm a new server: one that knows their grammars already may be harmed no more."""
        with open_site() as site:
            before = site.settle()
            site.take_victim()
            site.send(cases)
            longest = max(site.take_victim_later()["gaps"], default=0.0)
            now = site.processes()
            return any(process not in now for process in before) or longest > LONGEST_PAUSE * self._slack

    def _check_memory(self, site: Site, baseline: dict[Process, int]) -> None:
        """Wait until each process has about as much memory as before."""
        deadline = time.monotonic() + _MEMORY_SECONDS
        while True:
            grown = {process: process.memory - least for process, least in baseline.items()}
            grown = {p: more for p, more in grown.items() if more > MEMORY_GROWTH * (p.resident - more)}
            if not grown:
                return
            if time.monotonic() > deadline:
                self.found.memory += [
                    f"the memory of {process.title} grew by {more >> 20} MiB to {process.memory >> 20} MiB"
                    for process, more in grown.items()
                ]
                return
            time.sleep(1.0)

    def _read_log(self, site: Site) -> None:
        lines = site.server.lines
        starts = [index for index, line in enumerate(lines) if line.startswith("Traceback")]
        self.found.tracebacks += [
            "in the log: " + " / ".join(lines[max(0, index - 1) : index + 40])[-1500:] for index in starts
        ]


def cases_of(count: int, seed: int, only: str = "") -> list[Case]:
    """The named cases, then drawn ones, `count` in all; `only`: drawn ones of that kind alone."""
    named = [] if only else named_cases()
    return [*named, *(drawn_case(seed, number, only) for number in range(count - len(named)))]


def main() -> int:
    """Send cases, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="only this case of the seed")
    parser.add_argument("--named", help="only named cases whose name contains this")
    parser.add_argument("--only", default="", help="only drawn cases of this kind")
    parser.add_argument("--slack", type=float, default=1.0, help="the victim's pauses may be so many times as long")
    arguments = parser.parse_args()
    os.nice(10)  # the attackers share the cores with the server, and the victim must not wait for them
    cases = cases_of(arguments.cases, arguments.seed, arguments.only)
    if arguments.number is not None:
        cases = [drawn_case(arguments.seed, arguments.number, arguments.only)]
    elif arguments.named is not None:
        cases = [case for case in named_cases() if arguments.named in case.name]
    found = Run(arguments.slack).run(cases)
    failures = found.failures(arguments.slack)
    print("\n".join(failures))
    print(f"answers by status: {dict(sorted(found.answers.items()))}; the victim's pauses: {found.describe_pauses()}")
    print(f"{'FAILED' if failures else 'PASSED'}: {len(cases)} cases, {len(failures)} failures")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
