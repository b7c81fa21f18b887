"""Child processes: what is left of one that crashes."""

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


def test_a_child_that_crashes_says_what_its_threads_did(capfd: pytest.CaptureFixture[str]) -> None:
    with patch.object(Child, "code", return_value=_CRASH):
        child = Child("none", [])
    assert child.wait(60.0)
    assert child.poll() == -signal.SIGSEGV
    assert "signal 11" in child.describe_end()
    printed = capfd.readouterr().err
    assert "Segmentation fault" in printed
    assert "in rank" in printed
