"""What became of a child process, in words."""

from __future__ import annotations

import subprocess


def describe_end(process: subprocess.Popen[bytes]) -> str:
    """How a process ended that has just closed its channel; waits a second for its exit code."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "closed its channel but still runs"
    if code == -9:
        return "was killed by signal 9 (somebody's kill, or the host ran out of memory)"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
