"""What a process does to itself before it runs what is not trusted, and how its end is explained."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from enum import Enum

_PR_SET_PDEATHSIG = 1
MEMORY_EXIT = 77
"""Exit code of a worker whose job needed more memory than it may."""


class Limit(Enum):
    """Why a worker ended in the middle of a job."""

    TIME = "time"
    DEADLINE = "deadline"
    """It was killed because it had not answered in time. It may have waited for the processor."""
    MEMORY = "memory"
    STACK = "stack"
    UNKNOWN = "unknown"
    """It was killed by somebody else, or failed."""


def limit_from_exit(code: int) -> Limit:
    """The limit that a process with this exit code has hit; a negative code is a signal."""
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return Limit.TIME
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return Limit.STACK
    if code in (-signal.SIGABRT, MEMORY_EXIT):  # Rust aborts if an allocation fails
        return Limit.MEMORY
    return Limit.UNKNOWN


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even if this process is stopped then.

    `parent`: the process id of the parent; if it has ended already, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def confine(memory: int) -> None:
    """Limit this process to `memory` bytes more than it has now. It leaves no core and says nothing on stderr."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + memory,) * 2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # a library that aborts says so itself, once for each hostile request
    os.close(null)


def data_bytes() -> int:
    """The private memory of this process that RLIMIT_DATA counts, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
