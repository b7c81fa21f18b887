"""What holds for all commands."""

from __future__ import annotations

import signal
import subprocess
import sys


def test_a_fault_says_where_each_thread_was() -> None:
    code = f"""
import os
from shardline.cli.main import main
try:
    main(["--version"])
except SystemExit:
    os.kill(os.getpid(), {signal.SIGSEGV})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert 'File "<string>", line ' in done.stderr
