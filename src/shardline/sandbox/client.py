"""The client's side of a sandbox: it starts the nursery, and gets workers from it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import weakref

from shardline import env
from shardline.lifeline import start_process
from shardline.sandbox.worker import Worker

_CODE = "from shardline.sandbox.nursery import main; main()"
_SEND_SECONDS = 1.0
"""Seconds that a worker may take to read a job; it reads while it has none."""


class Sandbox:
    """Workers of one service, for any thread. Its nursery starts with the first worker, and again if it has ended.

    The kernel kills the nursery and its workers when this process ends.
    """

    def __init__(self, module: str, argument: str = "", *, title: str, memory: int) -> None:
        """`module`: has `open_service(argument)`, see `nursery.Service`. `memory`: bytes that a worker may allocate."""
        self._arguments = [module, argument, title, str(memory)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._finalizer: weakref.finalize[..., Sandbox] | None = None

    def start(self) -> None:
        """Start the nursery, unless it runs. This takes some milliseconds."""
        with self._lock:
            self._start()

    def fork(self, niceness: int = 0) -> Worker:
        """A new worker, which yields to others the more, the larger its niceness is. It begins when the nursery has
        prepared its service."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_SECONDS)
        status, status_end = os.pipe()
        try:
            with self._lock:
                self._send_request(str(niceness).encode(), [theirs.fileno(), status_end])
        except BaseException:
            ours.close()
            os.close(status)
            raise
        finally:
            theirs.close()
            os.close(status_end)
        return Worker(ours, status)

    def _send_request(self, request: bytes, fds: list[int]) -> None:
        if self._requests is not None:
            with contextlib.suppress(OSError):  # it has ended, or reads nothing
                socket.send_fds(self._requests, [request], fds)
                return
        self._end()
        self._start()
        assert self._requests is not None
        socket.send_fds(self._requests, [request], fds)

    def _start(self) -> None:
        if self._requests is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [theirs.fileno(), *self._arguments]
            self._process = start_process(_CODE, arguments, env.for_sandbox(), pass_fds=[theirs.fileno()])
        ours.setblocking(False)
        self._requests = ours
        self._finalizer = weakref.finalize(self, _end_process, ours, self._process)

    @property
    def pid(self) -> int | None:
        """The nursery's process id; None: it has not started."""
        process = self._process
        return None if process is None else process.pid

    @property
    def has_started(self) -> bool:
        """Whether a nursery was started that has not been closed."""
        return self._requests is not None

    def close(self, pid: int | None = None) -> None:
        """End the nursery and all workers. `pid`: only if this is the nursery's process id."""
        with self._lock:
            if pid is None or pid == self.pid:
                self._end()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._requests = self._process = self._finalizer = None


def _end_process(requests: socket.socket, process: subprocess.Popen[bytes]) -> None:
    requests.close()
    process.kill()
    process.wait()
