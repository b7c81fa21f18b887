"""Processes that compute for the doctor, because it imports no torch."""

from __future__ import annotations

import subprocess
import sys

from shardline import env

_CODE = "import sys; sys.path[:] = [p for p in sys.path if p]; from {} import main; main()"


def start_main(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `main` of a module with these arguments. The folder in which the doctor runs hides no other module."""
    command = [sys.executable, "-c", _CODE.format(module), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env.for_children())


def await_output(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What the process has printed, and what went wrong (empty: nothing).

    Raises:
        TimeoutError: it takes longer than `timeout` seconds. It is killed.
    """
    with process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise TimeoutError(f"no answer within {timeout:.0f} s") from None
    if process.returncode:
        return "", (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return output, ""
