"""Processes that a fork server forks: they inherit what they should, and their ends are known."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.engine.forks import ForkedProcess, Forks

CHILD = """
import os, socket, sys, threading

def main():
    channel = socket.socket(fileno=int(sys.argv[1]))
    given = os.environ.get("GIVEN"), os.environ.get("OPENBLAS_NUM_THREADS")
    found = sys.argv[2], *given, len(os.listdir("/proc/self/fd"))
    channel.send(repr(found).encode())
    sys.exit(int(channel.recv(8)))
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "forked_child.py").write_text(CHILD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        server = Forks.start(["forked_child"])
    deadline = time.monotonic() + 20
    while server.fileno() < 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield server
    server.close()
    assert not server.runs


def start(forks: Forks, grace: float = 0.0) -> tuple[ForkedProcess, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with theirs:
        child = forks.fork("forked_child", [theirs.fileno(), -1], {"GIVEN": "yes", "PATH": "/bin"}, grace)
    assert child is not None
    return child, ours


def test_a_forked_process_has_what_it_was_given(forks: Forks) -> None:
    others = [start(forks) for _ in range(2)]
    child, channel = start(forks)
    assert channel.recv(100) == b"('-1', 'yes', None, 5)", "its own socket, three standard files, and the list itself"
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    channel.send(b"7")
    assert child.wait(5) == 7
    assert child.poll() == 7
    channel.close()
    for other, channel in others:
        other.kill()
        assert other.wait(5) == -signal.SIGKILL
        channel.close()


@pytest.mark.parametrize("ended", [1, 2])
def test_a_fork_that_ends_at_once_is_tried_again_once(
    forks: Forks, ended: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pids: list[int] = []
    open_pid = os.pidfd_open

    def note_pid(pid: int) -> int:
        pids.append(pid)
        if len(pids) <= ended:
            raise ProcessLookupError
        return open_pid(pid)

    monkeypatch.setattr(os, "pidfd_open", note_pid)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = forks.fork("forked_child", [theirs.fileno(), -1], {}, 0.0)
        assert (child is None) == (ended == 2)
        if child is not None:
            child.kill()
            child.wait(5)
    assert [f"(pid {pid}) has ended at once" in caplog.text for pid in pids[:ended]] == [True] * ended


def test_a_forked_process_ends_with_its_owner(forks: Forks) -> None:
    pids = []
    for grace in (0.0, 60.0):
        child, channel = start(forks, grace)
        os.kill(child.pid, signal.SIGSTOP)
        pids.append(child.pid)
        child._status.close()
        channel.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pids[0]}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{pids[1]}").exists()
    os.kill(pids[1], signal.SIGKILL)


def test_without_a_server_nothing_is_forked() -> None:
    forks = Forks.start(["no_such_module"])
    assert forks._process is not None
    forks._process.wait(20)
    assert forks.fork("forked_child", [], {}, 0.0) is None
    assert not forks.runs
    forks.close()
