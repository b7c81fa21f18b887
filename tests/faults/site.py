"""A server over several hosts, with what its log says, for tests that take parts of it away."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.hosts import Hosts, await_ready
from tests.forks import ForkServer, Process

SMALL = ("demo", "--device", "cpu", "--cpu-threads", "1", "--kv-cache-memory", "32MiB", "--join-timeout", "60")


class Site:
    """A server over hosts of its own."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *flags: str,
        started: int | None = None,
        shm: str = "",
        forks: ForkServer | None = None,
        **environment: str,
    ) -> None:
        """A server over `count` hosts, of which the first `started` start their node; None: all. `shm` and `forks`: see
        `Hosts`."""
        self._environment = environment
        self.hosts = Hosts(count, shm, forks)
        self.logs = [folder / f"host{index}.log" for index in range(count)]
        self._flags = (*SMALL, "--nnodes", str(count), "--master-addr", self.hosts.address(0), *flags)
        self.nodes = [self.start_node(index) for index in range(1, started or count)]
        self.head = self.start_node(0)
        self.url = f"http://{self.hosts.address(0)}:8000"

    def start_node(self, index: int, *more: str, **environment: str) -> Process:
        variables = {**self._environment, **environment}
        return self.hosts.start(index, *self.words(index), *more, log=self.logs[index], **variables)

    def words(self, index: int) -> tuple[str, ...]:
        """The words after `shardline` that start a node."""
        flags = ("--host", "0.0.0.0") if index == 0 else ("--node-rank", str(index))
        return ("serve", *self._flags, *flags)

    def await_ready(self, seconds: float = 60.0) -> None:
        try:
            await_ready(self.hosts.address(0), seconds, self.head)
        except AssertionError:
            pytest.fail("\n".join(log.read_text() for log in self.logs))

    def log(self, index: int = 0) -> str:
        return self.logs[index].read_text()

    def pids(self, pattern: str) -> list[int]:
        """The processes that the start-up report of the log names."""
        return [int(pid) for pid in re.findall(pattern, self.log())]


@contextlib.contextmanager
def site(folder: Path, count: int, *flags: str, forks: ForkServer | None = None) -> Iterator[Site]:
    """A server that is ready; `forks`: see `Hosts`."""
    site = Site(folder, count, *flags, forks=forks)
    try:
        site.await_ready()
        yield site
    finally:
        site.hosts.close()


def await_line(site: Site, pattern: str, seconds: float, index: int = 0) -> float:
    """Seconds until the log of a host has a line; fails after `seconds`."""
    began = time.monotonic()
    while not re.search(pattern, site.log(index)):
        if time.monotonic() - began > seconds:
            pytest.fail(f"no line {pattern!r} within {seconds} s in:\n{site.log(index)}")
        time.sleep(0.02)
    return time.monotonic() - began
