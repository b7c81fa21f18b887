"""Hosts that share nothing but a network and the file system: network namespaces on a bridge."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.forks import ForkServer, Process

TOKEN = "a-token-of-these-tests-only"
_PORT = 8000
_numbers = itertools.count()


class Hosts:
    """`count` hosts with one interface each, at addresses that this process can reach too.

    Names carry the id of this process, and everything goes with `close`.
    """

    def __init__(self, count: int, shm: str = "", forks: ForkServer | None = None) -> None:
        """`shm`: the size of /dev/shm on each host, for example 64k; empty: they have that of this machine. `forks`:
        what starts commands; None: they start as users start them."""
        if os.geteuid() != 0 and "CI" not in os.environ:
            pytest.skip("network namespaces need root")
        self._shm = shm
        self._forks = forks
        pid = os.getpid()
        number = next(_numbers)
        self._prefix = f"sl{pid}n{number}"
        self._net = f"10.{64 + pid % 128}.{(pid // 128 + 31 * number) % 256}"
        self._switch = f"{self._prefix}s"
        self._spaces = [f"{self._prefix}h{index}" for index in range(count)]
        self._children: list[Process] = []
        for space in (self._switch, *self._spaces):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for index, space in enumerate(self._spaces):
            self._connect(f"p{index}", space, "eth0", f"{self.address(index)}/24")
        self._connect("uplink", None, self._prefix, f"{self._net}.254/24")

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{self._net}.{host + 1}"

    def start(self, host: int, *words: str, log: Path, **environment: str) -> Process:
        """Start `shardline WORDS…` on a host; its output goes to `log`."""
        if self._forks is not None:
            variables = {"SHARDLINE_JOIN_TOKEN": TOKEN, **environment}
            with log.open("a") as output:
                forked = self._forks.start_command(
                    *words, output=output.fileno(), namespace=self._spaces[host], environment=variables
                )
            self._children.append(forked)
            return forked
        code = "import sys; from shardline.cli.main import main; sys.exit(main())"
        return self.start_script(host, code, *words, log=log, **environment)

    def start_script(self, host: int, code: str, *words: str, log: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a Python program with these arguments on a host; its output goes to `log`."""
        command = self.command(host, sys.executable, "-c", code, *words)
        with log.open("a") as output:
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
                env={**os.environ, "SHARDLINE_JOIN_TOKEN": TOKEN, **environment},
            )
        self._children.append(child)
        return child

    def command(self, host: int, *words: str) -> list[str]:
        """The words that run a program on a host."""
        if self._shm:  # a namespace of the network comes with one of mounts
            mount = f'mount -t tmpfs -o size={self._shm} shm /dev/shm && exec "$@"'
            words = ("sh", "-c", mount, "sh", *words)
        return ["ip", "netns", "exec", self._spaces[host], *words]

    def add_address(self, host: int, address: str) -> None:
        """Give a host an address that no other host can reach."""
        _ip("-n", self._spaces[host], "addr", "add", f"{address}/32", "dev", "lo")

    def cut(self, host: int) -> None:
        """Drop all packets of a host, silently."""
        _run("ip", "netns", "exec", self._switch, "bridge", "link", "set", "dev", f"p{host}", "state", "0")

    def heal(self, host: int) -> None:
        """End a cut."""
        _run("ip", "netns", "exec", self._switch, "bridge", "link", "set", "dev", f"p{host}", "state", "3")

    def unplug(self, host: int) -> None:
        """Cut a host off so that it notices: its link is down."""
        _ip("-n", self._switch, "link", "set", "dev", f"p{host}", "down")

    def plug(self, host: int) -> None:
        """End what `unplug` has done."""
        _ip("-n", self._switch, "link", "set", "dev", f"p{host}", "up")

    def slow(self, host: int, rate: str) -> None:
        """Limit what a host sends, for example to 100mbit."""
        self._queue(self._spaces[host], "eth0", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")

    def mute(self, host: int) -> None:
        """Drop what a host sends, silently; it still hears the others."""
        self._queue(self._spaces[host], "eth0", "blackhole")

    def deafen(self, host: int) -> None:
        """Drop what others send to a host, silently; they still hear it."""
        self._queue(self._switch, f"p{host}", "blackhole")

    @contextlib.contextmanager
    def losing(self, host: int, lost: float, passed: float) -> Iterator[None]:
        """Again and again, drop all packets for `lost` seconds and none for `passed`, in turn in both directions."""
        ended = threading.Event()

        def lose() -> None:
            for drop in itertools.cycle((self.mute, self.deafen)):
                drop(host)
                is_over = ended.wait(lost)
                self.clear(host)
                if is_over or ended.wait(passed):
                    return

        thread = threading.Thread(target=lose, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def clear(self, host: int) -> None:
        """End what `slow`, `mute` and `deafen` have done."""
        for space, device in ((self._spaces[host], "eth0"), (self._switch, f"p{host}")):
            with contextlib.suppress(subprocess.CalledProcessError):  # there is nothing to end
                _run("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root")

    def close(self) -> None:
        """End all processes and remove the network."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
        for space in self._spaces:
            for pid in pids_in(space):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for space in (*self._spaces, self._switch):
            _ip("netns", "del", space)

    def pids(self, host: int) -> list[int]:
        """The processes of a host."""
        return pids_in(self._spaces[host])

    def listeners(self, host: int) -> set[int]:
        """The TCP ports on which processes of a host listen."""
        found = set()
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pids(host)[0]}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":
                    found.add(int(words[1].rpartition(":")[2], 16))
        return found

    def _queue(self, space: str, device: str, *words: str) -> None:
        _run("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", device, "root", *words)

    def _connect(self, port: str, space: str | None, interface: str, address: str) -> None:
        inside = ("-n", space) if space else ()
        peer = ("netns", space) if space else ("netns", "1")
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", interface, *peer)
        _ip("-n", self._switch, "link", "set", "dev", port, "master", "br0", "up")
        _ip(*inside, "addr", "add", address, "dev", interface)
        _ip(*inside, "link", "set", "dev", interface, "up")


def await_ready(address: str, seconds: float, *processes: Process) -> None:
    """Wait until the server at an address is ready, while these processes run."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in processes:
            assert process.poll() is None, "a node has ended"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://{address}:{_PORT}/ready", timeout=2.0).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server was not ready within {seconds:g} s")


def pids_in(space: str) -> list[int]:
    """The processes in a network namespace, in the order of their numbers."""
    number, found = os.stat(f"/run/netns/{space}").st_ino, []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and os.stat(folder / "ns/net").st_ino == number:
                found.append(int(folder.name))
    return sorted(found)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
