"""The use of a fork server (`engine.fork_server`): its start, forks, and the processes that came of them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

import msgspec

from shardline import env
from shardline.engine.fork_server import MAX_FDS, MAX_REQUEST_BYTES, READY, ForkRequest

_ANSWER_SECONDS = 2.0
"""Seconds that a fork may take; after that, the process is started in the usual way."""
_FORKS = 2
"""A fork that has ended at once is tried again; after that, the process is started in the usual way."""
_DELAY = 10.0
"""Seconds from a start to that of the fork server: programs that end soon do not pay for it."""
_END_SECONDS = 1.0
_CODE = "import sys; sys.path[:] = [p for p in sys.path if p]; import shardline.engine.fork_server as s; s.main()"

_log = logging.getLogger(__name__)


class ForkedProcess:
    """A process that a fork server has forked, with the methods of subprocess.Popen that are used here."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        """`status`: the server sends the exit code there.

        Raises:
            ProcessLookupError: the process has ended already.
        """
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._pidfd)
        weakref.finalize(self, status.close)

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process; returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self.returncode is None:
            if not _is_readable(self._pidfd, timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout)
            self._read_code()
        assert self.returncode is not None
        return self.returncode

    def _read_code(self) -> None:
        with self._lock:
            if self.returncode is not None:
                return
            self._status.settimeout(_END_SECONDS)
            code = b""
            with contextlib.suppress(OSError):
                code = self._status.recv(4)
            # Without its server, the kernel kills a rank.
            self.returncode = int.from_bytes(code, "little", signed=True) if code else -signal.SIGKILL
            self._status.close()

    def kill(self) -> None:
        """Kill the process, even if it is stopped."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Forks:
    """A client of a fork server. The first client starts the server; engines get a connection to it, too."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = True

    @classmethod
    def start(cls, modules: Sequence[str]) -> Forks:
        """Start a server that imports these modules. Until it has, `fork` returns None."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            forks = cls(ours)
            forks._is_ready = False
            forks._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env.for_fork_server(),
            )
        return forks

    @property
    def runs(self) -> bool:
        """Whether the server that this client has started has not ended."""
        return self._process is not None and self._process.poll() is None

    def fileno(self) -> int:
        """The descriptor that another client of the same server needs; -1: the server is not ready."""
        return self._requests.fileno() if self._check_ready() else -1

    def fork(
        self, module: str, fds: Sequence[int], environment: Mapping[str, str], grace: float
    ) -> ForkedProcess | None:
        """Fork a process that runs `module.main()` with the numbers of `fds` as arguments; -1 stands for itself.

        None: there is no server that does it at once. `grace`: seconds that the process may outlive this one.
        """
        inherited = [fd for fd in fds if fd >= 0]
        arguments = tuple(inherited.index(fd) if fd >= 0 else fd for fd in fds)
        body = msgspec.msgpack.encode(ForkRequest(module, arguments, dict(environment), grace))
        if len(inherited) > MAX_FDS or len(body) > MAX_REQUEST_BYTES or not self._check_ready():
            return None
        try:
            for _ in range(_FORKS):
                pid, lifeline = self._ask_for_fork(body, inherited)
                with contextlib.suppress(ProcessLookupError):
                    return ForkedProcess(pid, lifeline)
                lifeline.close()
                _log.warning("a fork for %s (pid %d) has ended at once", module, pid)
        except OSError:  # the server has ended or is stopped; a late child sees that nobody wants it
            pass
        return None

    def _ask_for_fork(self, body: bytes, fds: Sequence[int]) -> tuple[int, socket.socket]:
        """The process id of a new child, and the socket that it watches.

        Raises:
            OSError: the server does not answer.
        """
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_SECONDS)
        try:
            with theirs:
                socket.send_fds(self._requests, [body], [theirs.fileno(), *fds])
            if not (answer := ours.recv(4)):
                raise ConnectionError("the server has ended")
        except OSError:
            ours.close()
            raise
        return int.from_bytes(answer, "little"), ours

    def close(self) -> None:
        """Let the server end after its children."""
        is_ready = self._check_ready()
        self._requests.close()
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS if is_ready else 0.0)  # one that imports reads nothing yet
            except subprocess.TimeoutExpired:  # it is stopped, or waits for a child that hangs in the kernel
                self._process.kill()
                self._process.wait(_END_SECONDS)

    def _check_ready(self) -> bool:
        if not self._is_ready and self._requests.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._is_ready = self._requests.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._is_ready and self._requests.fileno() >= 0


class KeptForks:
    """Keeps a fork server for restarts: it starts some seconds after the first processes, and again if it has ended."""

    def __init__(self) -> None:
        self._forks: Forks | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def current(self) -> Forks | None:
        """The server, if it runs."""
        forks = self._forks
        return forks if forks is not None and forks.runs else None

    @property
    def is_importing(self) -> bool:
        """Whether the server runs, but cannot fork yet."""
        forks = self.current
        return forks is not None and forks.fileno() < 0

    def start_now(self, modules: Sequence[str]) -> None:
        """Start a server that imports these modules; none: have no server."""
        if modules:
            self._start(modules)

    def start_later(self, modules: Sequence[str]) -> None:
        """Processes have started: have a server for the next ones that imports these modules; none: have no server."""
        with self._lock:
            if (
                not modules
                or self._is_closed
                or self.current is not None
                or (self._timer is not None and self._timer.is_alive())
            ):
                return
            self._timer = threading.Timer(_DELAY, self._start, (modules,))
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Let the server end, and start no other one."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._forks is not None:
                self._forks.close()

    def _start(self, modules: Sequence[str]) -> None:
        with self._lock:
            if not self._is_closed:
                if self._forks is not None:
                    self._forks.close()
                self._forks = Forks.start(modules)


def _is_readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(int(1000 * timeout)))
