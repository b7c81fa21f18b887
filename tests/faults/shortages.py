"""Memory, file descriptors and disks that are short for a while."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MEMORY_BYTES = 48 << 20
"""What processes short of memory may allocate more: less than a rank needs to start."""

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def small_memory(pids: Sequence[int]) -> Iterator[None]:
    """Processes and their children may allocate few bytes more: by a cgroup, or else by their address space."""
    group = _cgroup()
    if group is None:
        with contextlib.ExitStack() as stack:
            for pid in pids:
                stack.enter_context(_limited(pid, resource.RLIMIT_AS, _address_space(pid) + MEMORY_BYTES))
            yield
        return
    before = {pid: _memory_group(pid, group.parent) for pid in pids}
    limit = group / ("memory.limit_in_bytes" if group.parent == _V1 else "memory.max")
    limit.write_text(str(MEMORY_BYTES))
    try:
        for pid in pids:
            _move(pid, group)
        yield
    finally:
        limit.write_text("-1" if group.parent == _V1 else "max")
        home = next(iter(before.values()), group.parent)
        _empty(group, home)


@contextlib.contextmanager
def spare_descriptors(pid: int, count: int) -> Iterator[None]:
    """A process may open so many files more."""
    with _limited(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd")) + count):
        yield


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """The disk of a folder has no free byte."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def _limited(pid: int, kind: int, limit: int) -> Iterator[None]:
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (limit, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (soft, hard))


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def _cgroup() -> Path | None:
    """A new group with a controller of memory; None: this machine lends none."""
    is_v2 = (_V2 / "cgroup.controllers").exists()
    group = (_V2 if is_v2 else _V1) / f"shardline-chaos-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError:
        return None
    if not (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).exists():
        group.rmdir()
        return None
    return group


def _memory_group(pid: int, root: Path) -> Path:
    """The group of a process."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or (root == _V2 and not controllers):
            return root / path.lstrip("/")
    return root


def _move(pid: int, group: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


def _empty(group: Path, home: Path) -> None:
    """Move all processes of a group, and remove it."""
    for _ in range(50):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                _move(int(pid), home)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
