"""Processes that end with the process that has started them, even if they are stopped or hang: the kernel kills them.

When Linux says the parent of a process, it means the *thread* that has started it. The thread of a restart ends soon,
and its children would end with it. So one thread starts all children, and it lives as long as this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_Start = Callable[[], "subprocess.Popen[bytes]"]
_Order = tuple[_Start, "Future[subprocess.Popen[bytes]]"]

_BEGIN = """\
import sys; sys.path[:] = [p for p in sys.path if p]
import ctypes, os; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {SIGKILL})
if os.getppid() != {pid}: os._exit(1)
"""
"""What a child does first: its parent may have ended before the kernel knew what to do then.

The current directory may be a model's folder, and code in it must not be imported.
"""


def start_process(
    code: str,
    arguments: Sequence[object],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    stderr: int | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `code`, and ends with this process.

    Raises:
        OSError: it cannot be started.
    """
    begin = _BEGIN.format(PR_SET_PDEATHSIG=_PR_SET_PDEATHSIG, SIGKILL=int(signal.SIGKILL), pid=os.getpid())
    command = [sys.executable, "-c", begin + code, *map(str, arguments)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            pass_fds=tuple(pass_fds),
            stdin=stdin,
            stderr=stderr,
            env=environment,
            start_new_session=start_new_session,
        )

    process: Future[subprocess.Popen[bytes]] = Future()
    _orders_of(os.getpid()).put((start, process))
    try:
        return process.result()
    finally:
        del process  # its error refers to this frame, and so to the descriptors of all callers


def end_process() -> NoReturn:
    """End this process, after what is registered for its end, whatever its other threads do.

    Python would end each daemon thread that comes back from native code, and where that is C++, the process aborts.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):  # there may be none
            stream.flush()
    os._exit(0)


@functools.cache
def _orders_of(pid: int) -> queue.SimpleQueue[_Order]:
    """What the thread that starts children waits for. A fork of this process (`pid`) has a thread of its own."""
    orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
    threading.Thread(target=_start_children, args=(orders,), name="start-children", daemon=True).start()
    return orders


def _start_children(orders: queue.SimpleQueue[_Order]) -> None:
    while True:
        start, process = orders.get()
        try:
            process.set_result(start())
        except BaseException as error:
            process.set_exception(error)
        del start, process
