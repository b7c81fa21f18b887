"""The process that prepares a service once, and forks itself into confined workers.

It has one thread, and runs nothing that came with a request. Its client is a `sandbox.client.Sandbox`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable

from shardline.process_title import set_process_title
from shardline.sandbox.confinement import MEMORY_EXIT, confine, data_bytes, end_with_parent

Service = Callable[[bytes], bytes]
"""Does one job: the body of a request in, the body of the answer out. `MODULE.open_service(argument)` makes it."""

REQUEST = struct.Struct("<dI")
"""Processor seconds that the job may take, and the length of the body that follows."""
ANSWER = struct.Struct("<BI")
"""Whether the service failed, and the length of the body that follows: its answer, or a traceback."""
PID = struct.Struct("<i")
"""A worker's first message: its process id."""
_GROWTH = 0.25
"""A worker that has kept more of its memory than this share after a job ends; a new one takes its place."""


def main() -> None:
    """The arguments: the descriptor of the requests to fork, a module and what it gets, the title of the workers, and
    the bytes that a worker may allocate."""
    requests_fd, module, argument, title, memory = sys.argv[1:6]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_process_title(f"sandbox nursery ({title})")
    service = importlib.import_module(module).open_service(argument)
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=int(requests_fd))
    if (sock := _fork_workers(requests)) is not None:
        set_process_title(f"sandbox ({title})")
        _work(sock, service, int(memory))


def _fork_workers(requests: socket.socket) -> socket.socket | None:
    """Fork until the client ends. Returns the socket of its jobs in each worker, and None in the nursery at the end.

    A request is what is added to the worker's niceness. The client gets a worker's exit code over a pipe of its own.
    """
    nursery = os.getpid()
    statuses: dict[int, int] = {}
    """Pipes to write exit codes to, by process id."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == woken:
                os.read(woken, 4096)
                _report_ends(statuses)
                continue
            data, fds = b"", list[int]()
            with contextlib.suppress(ConnectionError):
                data, fds, _, _ = socket.recv_fds(requests, 16, 2)
            if not data:
                return None
            job_fd, status_fd = fds
            if (pid := os.fork()) == 0:
                os.nice(int(data))
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                end_with_parent(nursery)
                for other in (*statuses.values(), status_fd, woken, wake):
                    os.close(other)
                requests.close()
                return socket.socket(fileno=job_fd)
            os.close(job_fd)
            statuses[pid] = status_fd


def _report_ends(statuses: dict[int, int]) -> None:
    """Tell the client the exit codes of the workers that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = statuses.pop(pid)
        with contextlib.suppress(OSError):  # the client wants to know no more
            os.write(fd, PID.pack(os.waitstatus_to_exitcode(status)))
        os.close(fd)


def _work(sock: socket.socket, service: Service, memory: int) -> None:
    """Do jobs until the client closes the socket."""
    confine(memory)
    base = data_bytes()
    sock.sendall(PID.pack(os.getpid()))
    while header := sock.recv(REQUEST.size, socket.MSG_WAITALL):
        seconds, size = REQUEST.unpack(header)
        body = sock.recv(size, socket.MSG_WAITALL) if size else b""
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends this process
        failed = False
        try:
            answer = service(body)
        except MemoryError:
            os._exit(MEMORY_EXIT)
        except Exception:
            failed, answer = True, traceback.format_exc().encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sock.sendall(ANSWER.pack(failed, len(answer)) + answer)
        del body, answer
        if data_bytes() - base > _GROWTH * memory:
            return


if __name__ == "__main__":
    main()
