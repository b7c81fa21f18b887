"""How much memory and how many cores this host, or the container this process runs in, can give."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_host_memory() -> int:
    """Bytes that can still be had: of the host, and within every control group around this process."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for group in _own_groups("memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            # Page cache counts as used, but is given back when it is needed.
            available = min(available, max(0, limit - used + _reclaimable(group)))
    return available


def allowed_cpus() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0))
    for group in _own_groups("cpu"):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _own_groups(controller: str) -> list[Path]:
    """The folders of this process's control group and those around it; version 2, and version 1 of `controller`."""
    folders: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        folder = root / name.lstrip("/")
        while folder.is_relative_to(root):
            folders.append(folder)
            if folder == root:
                break
            folder = folder.parent
    return [folder for folder in folders if folder.is_dir()]


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
