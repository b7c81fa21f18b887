"""Pairs of faults: a process is killed or stopped while another one is down, starts, or is short of something.

    python -m tests.faults.chaos_pairs --pairs 100 --seed 1 --minutes 20

The first of a pair is one of TROUBLES, and the second one follows within three seconds, or while the first one lasts.
The server runs two replicas of two stages on two hosts, whose /dev/shm has 64 KiB. Answers must be right, no client may
hang, each fault must be named within ten seconds, and no process may be left at the end. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardline.checkpoints.hub import DEMO_FOLDER
from tests.faults.chaos import LAYOUT, Chaos, Report
from tests.faults.chaos_faults import Fault, appears
from tests.faults.processes import alive, command_line
from tests.faults.shortages import full_disk, small_memory, spare_descriptors
from tests.faults.site import Site

NAMED_WITHIN = 10.0
"""Seconds from a fault to the line that names it."""
SHORTAGE = 5.0
"""Seconds for which memory, descriptors or disk are short."""
LINKS = ("cut", "unplug", "mute", "deafen", "slow", "lossy")
"""What is done to the link of node 1. mute: what the node sends is lost; deafen: what is sent to it; slow: 1 Mbit/s;
lossy: nothing comes through for 0.1 s of each second, in one direction and then in the other."""
LINK_SECONDS = (1, 5, 30)
NOTICED_AFTER = 4.5
"""Seconds of silence that nodes notice."""
STRANGERS = {"flags": "--max-num-seqs differs", "model": "the models differ", "version": "shardline differs"}
"""A node that asks to join in the place of a lost one, and the words that refuse it."""
TARGETS = ("rank", "engine", "node", "head", "helper")
"""helper: any other child of a front or a node."""
TROUBLES = (
    *(f"{kind} {target}" for kind, target in itertools.product(("kill", "stop"), TARGETS)),
    "memory node",
    "descriptors front",
    "descriptors node",
    "disk logs",
    *(f"{link} {seconds}" for link, seconds in itertools.product(LINKS, LINK_SECONDS)),
    *(f"stranger {kind}" for kind in STRANGERS),
)


@dataclass(frozen=True)
class Pair:
    """A trouble, and the fault that comes on top of it."""

    trouble: str
    kind: str
    """kill or stop."""
    target: str
    """One of TARGETS."""
    state: str = "busy"

    @property
    def name(self) -> str:
        """For tables, which have a row for each trouble."""
        return self.trouble

    @property
    def words(self) -> str:
        """For messages."""
        return f"{self.trouble}, then {self.kind} {self.target}"

    @property
    def seconds(self) -> float:
        """How long the trouble lasts; 0: it is over by itself."""
        kind, _, word = self.trouble.partition(" ")
        return float(word) if kind in LINKS else SHORTAGE if kind in ("memory", "descriptors", "disk") else 0.0

    @property
    def runs_within(self) -> float:
        """Seconds from the first fault to the end of it all."""
        return 45.0 + self.seconds


PAIRS = tuple(Pair(*words) for words in itertools.product(TROUBLES, ("kill", "stop"), TARGETS))


class PairChaos(Chaos):
    """A server, its clients, and pairs of faults or single ones."""

    def __init__(self, folder: Path, seed: int, layout: Sequence[str] = LAYOUT, pause: float = 0.0) -> None:
        super().__init__(folder, seed, layout, pause, shm="64k")
        self._folder = folder

    def _cause_fault(self, pair: Fault | Pair) -> bool:
        """Cause the faults and wait until all is well again; False: it will not be."""
        if isinstance(pair, Fault):
            return super()._cause_fault(pair)
        self._flowing.set()
        self._await_streams(pair)
        self._begun += 2
        self._longest_pause = 0.0
        began = time.monotonic()
        with contextlib.ExitStack() as undo:
            named = [self._begin(pair, undo)]
            time.sleep(self._random.uniform(0.0, min(3.0, pair.seconds or 3.0)))
            named.append(self._hit(pair.kind, pair.target, undo))
            self._await_names(pair, named, began)
            time.sleep(max(0.0, began + pair.seconds - time.monotonic()))
        if pair.trouble.partition(" ")[0] in LINKS:
            time.sleep(2.0)  # both sides may be about to notice
        self._over = self._begun
        return self._await_replicas(pair, began)

    def _await_names(self, pair: Pair, named: Sequence[Callable[[], bool]], began: float) -> None:
        while not all(is_named() for is_named in named):
            if time.monotonic() - began > 2 * NAMED_WITHIN + 3.0:
                which = [number for number, is_named in enumerate(named, 1) if not is_named()]
                self.report.wrong.append(f"{pair.words}: not named: {which}")
                return
            time.sleep(0.02)
        seconds = time.monotonic() - began
        self.report.named[f"{pair.name}, busy"].append(seconds)
        if seconds > NAMED_WITHIN + 3.0:
            self.report.late.append(f"{pair.words}: both named after {seconds:.1f} s")

    def _begin(self, pair: Pair, undo: contextlib.ExitStack) -> Callable[[], bool]:
        """Begin the first fault; returns whether it is named by now."""
        site, (kind, _, word) = self.site, pair.trouble.partition(" ")
        if kind in ("kill", "stop"):
            return self._hit(kind, word, undo)
        if kind == "stranger":
            self._hit("kill", "node", undo)
            return self._let_stranger_ask(word)
        if kind in LINKS:
            undo.enter_context(bad_link(site, kind))
            silent = kind in ("cut", "unplug", "mute", "deafen") and pair.seconds > NOTICED_AFTER
            return self._says("(has not been heard of for|has closed)") if silent else lambda: True
        # Whoever lacks something may need it for nothing. If it does, the faults that follow are named.
        if kind == "memory":
            pids = [pid for pid in site.hosts.pids(1) if pid != site.nodes[0].pid]
            undo.enter_context(small_memory(pids))
        elif kind == "descriptors":
            undo.enter_context(spare_descriptors((site.head if word == "front" else site.nodes[0]).pid, 2))
        else:
            undo.enter_context(full_disk(self._folder))
        return lambda: True

    def _hit(self, kind: str, target: str, undo: contextlib.ExitStack) -> Callable[[], bool]:
        """Kill or stop a process; returns whether it is named by now, or what it belonged to."""
        if (pid := self._find_victim(target)) is None:
            return lambda: True
        title, host = command_line(pid), int(pid in self.site.hosts.pids(1))
        named = self._says("|".join([rf"pid {pid}\b", *_owners(title, target, host)]))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        if target == "node":
            undo.callback(self._faults.bring_back_node, kind)
        elif kind == "stop":
            undo.callback(_go_on, pid)
        # A helper is named when it is missed.
        return (lambda: True) if target == "helper" or self._disk_is_full() else named

    def _find_victim(self, target: str) -> int | None:
        """A process of this kind, as soon as there is one; None: there is none."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if target == "node":
                return pid if alive(pid := self.site.nodes[0].pid) else None
            found = self._faults.helpers() if target == "helper" else self._faults.newest(target)
            if found:
                return self._random.choice(found)
            if target == "helper":
                return None
            time.sleep(0.02)
        return None

    def _let_stranger_ask(self, kind: str) -> Callable[[], bool]:
        """Start a node that does not fit, in the place of node 1; returns whether the head refuses it."""
        site = self.site
        named = self._says(STRANGERS[kind])
        log, words = self._folder / "stranger.log", site.words(1)
        code = "import sys; from shardline.cli.main import main; sys.exit(main())"
        if kind == "flags":
            words = (*words, "--max-num-seqs", "7")
        elif kind == "version":
            code = f"import shardline; shardline.__version__ = '9.9'; {code}"
        else:
            words = tuple(str(_other_model(self._folder)) if word == "demo" else word for word in words)
        stranger = site.hosts.start_script(1, code, *words, log=log)
        try:
            status: int | None = stranger.wait(30.0)
        except subprocess.TimeoutExpired:
            status = None
            stranger.kill()
        if status != 2:
            self.report.wrong.append(f"a node with another {kind} ended with {status}: {log.read_text()[-500:]}")
        return named

    def _says(self, pattern: str) -> Callable[[], bool]:
        """Whether the log of any host has a line with this from now on."""
        logs = [appears(log, pattern) for log in self.site.logs]
        return lambda: any(named() for named in logs)

    def _disk_is_full(self) -> bool:
        return os.statvfs(self._folder).f_bavail == 0


def _owners(title: str, target: str, host: int) -> Iterator[str]:
    """Patterns that name what a process belonged to: its replica, its node."""
    if found := re.search(r"engine (\d)|dp (\d)", title):
        number = found[1] or found[2]
        yield rf"(engine|replica) {number}\b"
    if target == "head":
        yield "the head process "
    if host == 1 or target == "head":
        yield r"node 1 \(.*has (not been heard of|closed its connection)"
        yield "the head has (not been heard of|closed)"
        yield "still waiting for node 1"


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _other_model(folder: Path) -> Path:
    """The demo model with another number in its weights."""

    other = folder / "other-model"
    if not other.exists():
        shutil.copytree(DEMO_FOLDER, other)
        weights = other / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    return other


@contextlib.contextmanager
def bad_link(site: Site, kind: str) -> Iterator[None]:
    """The link of node 1 is bad."""
    hosts = site.hosts
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "cut": (lambda: hosts.cut(1), lambda: hosts.heal(1)),
        "unplug": (lambda: hosts.unplug(1), lambda: hosts.plug(1)),
        "mute": (lambda: hosts.mute(1), lambda: hosts.clear(1)),
        "deafen": (lambda: hosts.deafen(1), lambda: hosts.clear(1)),
        "slow": (lambda: hosts.slow(1, "1mbit"), lambda: hosts.clear(1)),
    }
    if kind == "lossy":
        with hosts.losing(1, 0.1, 0.4):
            yield
        return
    begin, end = ways[kind]
    begin()
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def small_disk(size: str = "64m") -> Iterator[Path]:
    """A folder on a disk of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def main() -> int:
    """Cause the pairs that the arguments ask for, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="so many of all, in random order")
    parser.add_argument("--first", type=int, default=1, help="number of the first pair; those before ran elsewhere")
    parser.add_argument("--only", default="", help="only pairs whose words contain this, for example 'memory node'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="cause no new pair after this time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a client after each answer")
    parser.add_argument("--report", type=Path, help="a file by which a run goes on where the last one stopped")
    parser.add_argument("--logs", type=Path, help="a folder to which the logs of the hosts are copied")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no host is left behind
    known = [pair for pair in PAIRS if arguments.only in pair.words]
    pairs = random.Random(arguments.seed).sample(known, min(arguments.pairs, len(known)))
    pairs = pairs[arguments.first - 1 :]
    if arguments.report and (report := Report.load(arguments.report)).tried >= len(pairs):
        print(f"{arguments.report} has these pairs; without it they are caused again", *report.lines(), sep="\n")
        return 1 if report.wrong else 0
    with small_disk() as folder:
        chaos = PairChaos(folder, arguments.seed, pause=arguments.pause)
        try:
            chaos.run(pairs, seconds=60 * arguments.minutes, kept=arguments.report)
        except (KeyboardInterrupt, SystemExit):
            chaos.report.wrong.append("interrupted")
        if arguments.logs:
            for log in chaos.site.logs:
                (arguments.logs / log.name).write_bytes(log.read_bytes())
    print("\n".join(chaos.report.lines()))
    return 1 if chaos.report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
