"""The faults of tests/faults/chaos.py: what is done to which process, and the line of a log that must name it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.processes import command_line, start_time
from tests.faults.site import Site

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "stall": signal.SIGUSR2}
"""A stall: the main thread hangs, and the pulse goes on; see tests/faults/stalling."""
STALLING = str(Path(__file__).parent / "stalling")
NAMED_WITHIN = {"kill": 1.0, "stop": 5.0, "cut": 6.0, "unplug": 6.0, "stall": 12.0}
"""Seconds from a fault to the line that names it."""
RUNS_WITHIN = {"kill": 10.0, "stop": 10.0, "cut": 15.0, "unplug": 15.0, "stall": 20.0}
"""Seconds from a fault to the end of it: streams go on."""

LOADING_HANGS_WITHIN = 75.0
"""The same for a rank or an engine that hangs while it loads: 60 s without progress, and 10 for an engine's own."""

_TITLES = {
    "rank": ("shardline: rank", "shardline.runtime.worker_process"),
    "engine": ("shardline: engine", "shardline.engine.process"),
    "node": ("shardline: node",),
    "head": ("shardline: head",),
}
"""What the command line of a process shows: a title, or what runs as long as it has none."""
_LOADING_SECONDS = 20.0


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str
    """kill, stop, stall; cut: all packets of the target's host are dropped; unplug: its link is down."""
    target: str
    """rank, engine, node (a headless node's process), head (the process that connects the nodes)."""
    state: str
    """idle: no requests; loading: an engine was killed before, and starts again; busy: streams flow."""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.kind} {self.target}"

    @property
    def named_within(self) -> float:
        """Seconds. A node that is stopped or hangs is noticed as one that is cut off."""
        if self.hangs_while_loading:
            return LOADING_HANGS_WITHIN
        if self.target == "node" and self.kind != "kill":
            return NAMED_WITHIN["cut"]
        return NAMED_WITHIN[self.kind]

    @property
    def runs_within(self) -> float:
        """Seconds."""
        return RUNS_WITHIN[self.kind] + (LOADING_HANGS_WITHIN if self.hangs_while_loading else 0.0)

    @property
    def is_short(self) -> bool:
        """Whether it is over in a second. Others wait for a deadline, or for a node that starts from nothing."""
        return self.kind == "kill" and self.target != "node"

    @property
    def hangs_while_loading(self) -> bool:
        """Loading has a deadline of its own."""
        return (self.kind, self.state) == ("stall", "loading") and self.target in ("rank", "engine")


PRODUCT = tuple(
    Fault(kind, target, state)
    for kind, target, state in itertools.product(
        ("kill", "stop", "cut", "unplug", "stall"), ("rank", "engine", "node", "head"), ("idle", "busy", "loading")
    )
    if kind not in ("cut", "unplug") or target in ("node", "head")  # ranks and engines are cut off with their host
)


class Faults:
    """Causes faults in a site of two hosts, and ends them again."""

    def __init__(self, site: Site, chooser: random.Random) -> None:
        self._site = site
        self._random = chooser

    def await_loading(self) -> bool:
        """Kill an engine, and wait until a process of its next start is there; whether it came."""
        before = set(self.pids("rank"))
        os.kill(self._random.choice(self.newest("engine")), signal.SIGKILL)
        deadline = time.monotonic() + _LOADING_SECONDS
        while time.monotonic() < deadline:
            new = set(self.pids("rank")) - before
            # A process that has its title has a pulse, too, and is about to import torch.
            if any(command_line(pid).startswith("shardline: rank") for pid in new):
                return True
            time.sleep(0.01)
        return False

    def cause(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Cause a fault. Returns whether it is named by now, by both sides of a cut, and what ends it."""
        site = self._site
        if fault.kind in ("cut", "unplug"):
            host = 0 if fault.target == "head" else 1
            sides = [self._appears("(has not been heard of for|has closed)", host=side) for side in range(2)]
            begin, end = {
                "cut": (site.hosts.cut, site.hosts.heal),
                "unplug": (site.hosts.unplug, site.hosts.plug),
            }[fault.kind]
            begin(host)
            return lambda: all(named() for named in sides), lambda: end(host)
        if fault.target == "node":
            node = site.nodes[0]
            named = self._appears(r"node 1 \(.*has (not been heard of for|closed its connection)")
            os.kill(node.pid, SIGNALS[fault.kind])
            return named, lambda: self.bring_back_node(fault.kind)
        # The last one is loading, if any is.
        if fault.state == "loading":
            pid = max(self.pids(fault.target), key=start_time)
        else:
            pid = self._random.choice(self.newest(fault.target))
        words = {"head": "the head process ", "engine": r"engine \d"}.get(fault.target, rf"pid {pid}\b")
        logs = [self._appears(words, host=host) for host in range(2)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[fault.kind])
        return lambda: any(named() for named in logs), lambda: None

    def pids(self, target: str) -> list[int]:
        """The processes of a kind."""
        found = []
        for host in range(2):
            for pid in self._site.hosts.pids(host):
                line = command_line(pid)
                if any(title in line for title in _TITLES[target]):
                    found.append(pid)
        return found

    def helpers(self) -> list[int]:
        """The processes with a title that are of no known kind."""
        known = [title for titles in (*_TITLES.values(), ("shardline: front",)) for title in titles]
        return [
            pid
            for host in range(2)
            for pid in self._site.hosts.pids(host)
            if (line := command_line(pid)).startswith("shardline: ") and not any(title in line for title in known)
        ]

    def newest(self, target: str) -> list[int]:
        """The newest process of each title: the one before it may still be ending."""
        newest = {command_line(pid): pid for pid in sorted(self.pids(target), key=start_time)}
        return [pid for title, pid in newest.items() if title.startswith("shardline: ")]

    def _appears(self, pattern: str, host: int = 0) -> Callable[[], bool]:
        return appears(self._site.logs[host], pattern)

    def bring_back_node(self, kind: str) -> None:
        """As the supervisor of a node would; one that was stopped goes on, as after a pause of a virtual machine."""
        node = self._site.nodes[0]
        if kind == "stop":
            os.kill(node.pid, signal.SIGCONT)
            return
        node.wait(20)
        self._site.nodes[0] = self._site.start_node(1)


def appears(path: Path, pattern: str) -> Callable[[], bool]:
    """Whether a log has an error or a warning with this from now on."""
    begin = path.stat().st_size
    line = re.compile(rf"^.* (?:ERROR|WARNING) .*(?:{pattern})".encode(), re.MULTILINE)

    def has_appeared() -> bool:
        with path.open("rb") as log:
            log.seek(begin)
            return line.search(log.read()) is not None

    return has_appeared
