"""Child processes: what is left of one that crashes, and how one ends whose threads compute."""

from __future__ import annotations

import signal
from unittest.mock import patch

import pytest

from shardline.engine.children import Child

_CRASH = """
import os, resource, signal, threading, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def rank(): time.sleep(60)
threading.Thread(target=rank, daemon=True).start()
os.kill(os.getpid(), signal.SIGSEGV)
"""

_COMPUTE = """
import mmap, resource, threading, time
from shardline import _cpu
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
group = _cpu.SharedGroup(mmap.mmap(-1, 1 << 20), 0, 2)
threading.Thread(target=group.barrier, daemon=True).start()
time.sleep(0.2)
print("the last line", end="")
"""


def test_a_child_that_crashes_says_what_its_threads_did(capfd: pytest.CaptureFixture[str]) -> None:
    with patch.object(Child, "code", return_value=_CRASH):
        child = Child("none", [])
    assert child.wait(60.0)
    assert child.poll() == -signal.SIGSEGV
    assert "signal 11" in child.describe_end()
    printed = capfd.readouterr().err
    assert "Segmentation fault" in printed
    assert "in rank" in printed


def test_a_child_ends_while_its_threads_are_in_native_code(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with patch.object(Child, "code", return_value=_COMPUTE):
            child = Child("none", [])
        assert child.wait(60.0)
        assert child.poll() == 0
    assert capfd.readouterr() == ("the last line" * 3, "")
