"""Processes end with the one that has started them, and not with the thread that asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from shardline.lifeline import start_process
from tests.faults.processes import assert_all_end

STARTER = """
import os, sys, time
from shardline.lifeline import start_process
child = start_process("import time; print('begun', flush=True); time.sleep(60)", [], os.environ)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_stopped_process_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        words = [parent.stdout.readline().strip() for _ in range(2)]
        words.remove("begun")
        child = int(words[0])
        os.kill(child, signal.SIGSTOP)
        parent.kill()
    assert_all_end([child], within=10)


def test_a_process_outlives_the_thread_that_asked_for_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    code = "import sys; print('begun', file=sys.stderr, flush=True); sys.exit(int(input()))"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    thread = threading.Thread(target=lambda: started.append(start_process(code, [], os.environ, **pipes)))
    thread.start()
    thread.join()
    [process] = started
    assert process.stderr is not None
    assert process.stderr.readline() == b"begun\n"
    time.sleep(0.2)
    process.communicate(b"5\n", timeout=20)
    assert process.returncode == 5


def test_a_process_whose_parent_has_ended_already_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    process = start_process("print('lives', file=sys.stderr)", [], os.environ, stderr=subprocess.PIPE)
    assert process.communicate(timeout=20)[1] == b""
    assert process.returncode == 1


def test_what_cannot_be_started_is_an_error() -> None:
    with pytest.raises(OSError, match="Argument list too long"):
        start_process("", ["x" * (1 << 20)], os.environ)
