"""A process that has imported what engines and ranks import, and forks itself into them: a start without imports.

Python and torch take more than a second of a core to import. So a failed replica starts again by forks of this process.
It has one thread only, opens no device, and holds no descriptor of its children. A first start does not use it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shardline.log import configure_logging
from shardline.process_title import set_process_title

MAX_FDS = 200
"""Descriptors that a child may inherit; one message carries no more than 253."""
MAX_REQUEST_BYTES = 1 << 17
READY = b"ready"

_log = logging.getLogger(__name__)


class ForkRequest(msgspec.Struct, frozen=True):
    """Become `module.main()`. The descriptors that come with it are the child's status socket and what it inherits."""

    module: str
    arguments: tuple[int, ...]
    """For each argument, its place among the inherited descriptors; -1 stands for itself."""
    environment: dict[str, str]
    grace: float
    """Seconds that the child may outlive its owner."""


@dataclass
class _ForkedChild:
    """A process that was forked, and the owner's end of its status socket."""

    pid: int
    pidfd: int
    status: socket.socket
    grace: float
    deadline: float | None = None
    """When it is killed, since its owner has ended."""


class ForkServer:
    """Forks until all its clients have ended."""

    def __init__(self, requests: socket.socket) -> None:
        """`requests`: a SOCK_SEQPACKET that all clients share."""
        self._requests = requests
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._children: dict[int, _ForkedChild] = {}
        """Each child twice: by its pidfd and by its status socket."""
        self._has_clients = True

    def serve(self) -> str | None:
        """Fork children as they are asked for. Returns the module to run in each child, and None at the end."""
        while self._has_clients or self._children:
            for fd, _ in self._poll.poll(self._milliseconds_to_next_kill()):
                if fd == self._requests.fileno():
                    if (module := self._handle_request()) is not None:
                        return module
                elif (child := self._children.get(fd)) is not None:
                    if fd == child.pidfd:
                        self._bury(child)
                    else:  # its owner has ended
                        self._poll.unregister(fd)
                        child.deadline = time.monotonic() + child.grace
            for child in list(self._children.values()):
                if child.deadline is not None and time.monotonic() >= child.deadline:
                    child.deadline = None
                    os.kill(child.pid, signal.SIGKILL)  # it was not reaped, so the number is still its own
        return None

    def _milliseconds_to_next_kill(self) -> int | None:
        deadlines = [child.deadline for child in self._children.values() if child.deadline is not None]
        return max(0, int(1000 * (min(deadlines) - time.monotonic())) + 1) if deadlines else None

    def _handle_request(self) -> str | None:
        data, fds = b"", list[int]()
        with contextlib.suppress(ConnectionError):  # the last client has ended without reading all
            data, fds, _, _ = socket.recv_fds(self._requests, MAX_REQUEST_BYTES, MAX_FDS + 1)
        if not data:
            self._poll.unregister(self._requests)
            self._has_clients = False
            return None
        request = msgspec.msgpack.decode(data, type=ForkRequest)
        status = socket.socket(fileno=fds[0])
        if (pid := os.fork()) == 0:
            status.close()  # the child's own one belongs to the server
            self._become_child(request, fds[1:])
            return request.module
        for fd in fds[1:]:
            os.close(fd)
        child = _ForkedChild(pid, os.pidfd_open(pid), status, request.grace)
        self._children |= {child.pidfd: child, status.fileno(): child}
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(status, 0)  # a hang-up is always reported
        with contextlib.suppress(OSError):
            status.send(pid.to_bytes(4, "little"))
        return None

    def _bury(self, child: _ForkedChild) -> None:
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            child.status.send(code.to_bytes(4, "little", signed=True))
        for fd in (child.pidfd, child.status.fileno()):
            del self._children[fd]
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
        os.close(child.pidfd)
        child.status.close()

    def _become_child(self, request: ForkRequest, fds: Sequence[int]) -> None:
        """Drop what belongs to the server, and take on what the child inherits."""
        self._requests.close()
        for fd, child in self._children.items():
            if fd == child.pidfd:
                os.close(fd)
                child.status.close()
        os.environ.clear()
        os.environ.update(request.environment)
        set_process_title(f"start of {request.module}")
        sys.argv = [sys.argv[0], *(str(fds[place] if place >= 0 else place) for place in request.arguments)]


def _why_not() -> str | None:
    """Why this process must not be forked, for people; None: it may."""
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        return f"imports have started {count - 1} threads"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (path := os.readlink(f"/proc/self/fd/{fd}")).startswith("/dev/nvidia"):
                return f"imports have opened {path}"
    return None


def main() -> None:
    """Entry point. The arguments are the descriptor of the requests, and the modules to import."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_process_title("fork server")
    configure_logging()
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if (why := _why_not()) is not None:
        _log.warning("restarts of engines take longer, since %s", why)
        return
    gc.collect()
    gc.freeze()
    try:
        requests.send(READY)
    except OSError:
        return  # all clients have ended meanwhile
    if (module := ForkServer(requests).serve()) is not None:
        importlib.import_module(module).main()


if __name__ == "__main__":
    main()
