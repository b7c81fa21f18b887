"""Limits of the operating system: open files, and what to say if a limit is reached."""

from __future__ import annotations

import contextlib
import errno
import resource

_RAISE_FILES = "raise it: `ulimit -n 65536`, LimitNOFILE=65536 in systemd, --ulimit nofile=65536 for a container"


def file_limit() -> int:
    """How many descriptors this process may have; their numbers are smaller."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_file_limit() -> None:
    """Let this process and its children have as many descriptors as the user may have.

    Programs that use `select` break with more than 1024, so this is only for our own ones.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the hard limit is more than the kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def describe_file_limit() -> str:
    """The limit on open files and how to raise it."""
    return f"the limit is {file_limit()} open files a process (RLIMIT_NOFILE); {_RAISE_FILES}"


def describe_shortage(error: BaseException) -> str | None:
    """What the host lacks, if this is the cause of an error; None: it is another one."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.EMFILE:
        return describe_file_limit()
    if error.errno == errno.EAGAIN:
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        number = "no limit" if most == resource.RLIM_INFINITY else str(most)
        return f"no process can be started: see `ulimit -u` ({number}), and pids.max of the cgroup"
    return {
        errno.ENFILE: "the host has no open files left: raise fs.file-max (sysctl)",
        errno.ENOMEM: "no memory is left on the host or in the cgroup",
        errno.ENOSPC: "no space is left on a disk or in /dev/shm",
    }.get(error.errno or 0)
