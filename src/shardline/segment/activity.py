"""What a process has done so far, so that others can tell slow loading from loading that hangs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Activity(msgspec.Struct, frozen=True):
    """Counters of a process and its descendants, such as compilers. Any change is progress."""

    work: int = 0
    """Pieces of work that it has counted itself; see `Pulse.work`."""
    num_bytes: int = 0
    """Bytes that it has read and written, and pages that it has mapped from files."""
    cpu_seconds: float = 0.0


def read_activity(pid: int, work: int) -> Activity:
    """The counters of a process of this user; those of one that has ended are 0."""
    num_bytes, ticks = 0, 0
    pids = [pid]
    while pids:
        process = Path(f"/proc/{pids.pop()}")
        with contextlib.suppress(OSError, ValueError):
            stat = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(stat[11]) + int(stat[12])
            num_bytes += int(stat[9])
            for line in (process / "io").read_text().splitlines():
                name, _, value = line.partition(": ")
                num_bytes += int(value) if name in ("rchar", "wchar", "read_bytes") else 0
        with contextlib.suppress(OSError):
            for task in (process / "task").iterdir():
                with contextlib.suppress(OSError):
                    pids += map(int, (task / "children").read_text().split())
    return Activity(work, num_bytes, ticks / _TICKS_PER_SECOND)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
