"""Servers on a real Ray cluster, whose nodes are network namespaces. `make ray` runs this file; no suite does."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shardline import LLM, SamplingParams
from tests.faults.hosts import Hosts, await_ready
from tests.faults.site import SMALL
from tests.faults.test_several_hosts import Reader
from tests.forks import Process

RAY = str(Path(sys.executable).parent / "ray")
RAY_TOKEN = "a-token-for-ray-in-these-tests-only"
PORT = "6379"


class RaySite:
    """Hosts with a raylet each, and a server whose front is on the first one."""

    def __init__(self, folder: Path, cpus: list[int], *, with_token: bool = True) -> None:
        self.hosts = Hosts(len(cpus))
        self.log_file = folder / "front.log"
        self._temp = tempfile.mkdtemp(prefix="slray")
        auth = {"RAY_AUTH_MODE": "token" if with_token else "disabled"}
        self._environment = {**os.environ, "RAY_AUTH_TOKEN": RAY_TOKEN, "PYTHONWARNINGS": "ignore"}
        for host, count in enumerate(cpus):
            start = ("--head", "--port", PORT, "--include-dashboard", "false", "--temp-dir", self._temp)
            words = start if host == 0 else ("--address", self.address)
            self._run(
                host,
                *("start", *words, "--num-cpus", str(count), "--node-ip-address", self.hosts.address(host)),
                *("--object-store-memory", str(100 << 20), "--disable-usage-stats"),
                environment={**self._environment, **auth},
            )

    @property
    def address(self) -> str:
        return f"{self.hosts.address(0)}:{PORT}"

    def serve(self, *flags: str, address: str | None = None) -> Process:
        words = (*SMALL, "--host", "0.0.0.0", "--distributed-executor-backend", "ray", *flags)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RAY_AUTH_MODE", raising=False)
            return self.hosts.start(
                0, "serve", *words, log=self.log_file, RAY_AUTH_TOKEN=RAY_TOKEN, RAY_ADDRESS=address or self.address
            )

    @property
    def url(self) -> str:
        return f"http://{self.hosts.address(0)}:8000"

    def log(self) -> str:
        return self.log_file.read_text()

    def await_line(self, pattern: str, seconds: float) -> float:
        began = time.monotonic()
        while not re.search(pattern, self.log()):
            assert time.monotonic() - began < seconds, f"no line {pattern!r} in:\n{self.log()}"
            time.sleep(0.05)
        return time.monotonic() - began

    def ours(self) -> list[str]:
        """The titles of our processes on all hosts."""
        titles = []
        for host in range(len(self.hosts._spaces)):
            for pid in self.hosts.pids(host):
                with contextlib.suppress(OSError):
                    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if title.startswith("shardline") or "shardline.cluster" in title or "NodeStarter" in title:
                        titles.append(f"{host}: {title[:60]}")
        return titles

    def close(self) -> None:
        self.hosts.close()
        shutil.rmtree(self._temp, ignore_errors=True)

    def _run(self, host: int, *words: str, environment: dict[str, str]) -> None:
        done = subprocess.run(
            self.hosts.command(host, RAY, *words), env=environment, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def ray_site(folder: Path, cpus: list[int], *, with_token: bool = True) -> Iterator[RaySite]:
    site = RaySite(folder, cpus, with_token=with_token)
    try:
        yield site
    finally:
        site.close()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What Reader's request gives on one rank."""
    with contextlib.closing(LLM("demo", device="cpu")) as llm:
        params = SamplingParams(max_tokens=400, temperature=0.8, seed=7, ignore_eos=True)
        return llm.generate("The first thing that", params, use_tqdm=False)[0].outputs[0].text


def test_two_hosts_give_the_answer_of_one_rank_and_leave_nothing(tmp_path: Path, undisturbed: str) -> None:
    with ray_site(tmp_path, [2, 2]) as site:
        for flags in (("-tp", "2", "-pp", "2"), ("-tp", "2", "-dp", "2")):
            site.log_file.write_text("")
            front = site.serve(*flags)
            await_ready(site.hosts.address(0), 90, front)
            assert Reader(site.url).finish(60) == undisturbed
            assert any(title.startswith("1: shardline: node") for title in site.ours())
            assert "asks for no token" not in site.log()
            os.kill(front.pid, signal.SIGTERM)
            assert front.wait(20) == 0
            deadline = time.monotonic() + 10
            while site.ours():
                assert time.monotonic() < deadline, site.ours()
                time.sleep(0.1)


def test_what_does_not_fit_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with ray_site(tmp_path, [2, 1], with_token=False) as site:
        for flags, address, message in (
            (("-tp", "2", "-pp", "2"), None, "Ray has too few free CPUs.* 2 of 2, .* 1 of 1"),
            (("-tp", "2", "--nnodes", "2", "--master-addr", "10.0.0.1"), None, "Ray chooses the nodes"),
            (("-tp", "2"), f"{site.hosts.address(1)}:1234", "no Ray cluster answers"),
        ):
            site.log_file.write_text("")
            began = time.monotonic()
            assert site.serve(*flags, address=address).wait(30) == 2
            assert time.monotonic() - began < 15
            assert re.search(message, site.log()), site.log()
            assert sum("shardline: error:" in line for line in site.log().splitlines()) == 1
        front = site.serve("-pp", "3")
        await_ready(site.hosts.address(0), 60, front)
        assert "asks for no token" in site.log()


def test_lost_ranks_are_placed_anew(tmp_path: Path, undisturbed: str) -> None:
    with ray_site(tmp_path, [1, 1, 1]) as site:
        front = site.serve("-pp", "2")
        await_ready(site.hosts.address(0), 90, front)
        used, spare = (1, 2) if any(title.startswith("1: shardline: node") for title in site.ours()) else (2, 1)
        # The node process ends: Ray's actor starts it again.
        reader = Reader(site.url)
        assert reader.begun.wait(20)
        for pid in _pids(site, used, "shardline: node"):
            os.kill(pid, signal.SIGKILL)
        assert reader.finish(60) == undisturbed
        # Its host is cut off: the ranks go to the spare one, long before Ray notices.
        httpx.get(f"{site.url}/health", timeout=5.0)
        reader = Reader(site.url)
        assert reader.begun.wait(20)
        began = time.monotonic()
        site.hosts.cut(used)
        assert reader.finish(60) == undisturbed
        print(f"cut: stream ended {time.monotonic() - began:.1f} s after it")
        assert _pids(site, spare, "shardline: node")
        assert "is placed on" in site.log()


def _pids(site: RaySite, host: int, title: str) -> list[int]:
    found = []
    for pid in site.hosts.pids(host):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                found.append(pid)
    return found
