"""Child processes: how they are started, and how they ended, in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from shardline import env


def start_child(module: str, fds: Sequence[int], gpus: str | None = None) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `module.main()`; its arguments are the numbers of these file descriptors.

    `gpus` is as in `env.for_children`. This is not multiprocessing, so the user's script needs no __main__ guard. The
    current directory is removed from the import path: otherwise a model's folder could contain code that is imported.
    """
    code = f"import sys; sys.path[:] = [p for p in sys.path if p]; from {module} import main; main()"
    command = [sys.executable, "-c", code, *map(str, fds)]
    return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=env.for_children(gpus))


def describe_end(process: subprocess.Popen[bytes]) -> str:
    """How a process that has just closed its channel ended; waits up to a second for its exit code."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "closed its channel but still runs"
    if code == -9:
        return "was killed by signal 9 (somebody's kill, or the host ran out of memory)"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
