"""A worker of a sandbox, as its client sees it: jobs go to it, and answers come back."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket

from shardline.sandbox.confinement import Limit, limit_from_exit
from shardline.sandbox.nursery import ANSWER, PID, REQUEST

STATUS_SECONDS = 1.0
"""Seconds that the nursery may take to tell how a worker has ended."""


class WorkerEnded(Exception):
    """A worker has ended in the middle of a job; `limit` says why."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit.value)
        self.limit = limit


class Worker:
    """A confined process that does one job after another. Jobs may be sent before earlier ones are answered."""

    def __init__(self, sock: socket.socket, status_fd: int) -> None:
        """`sock`: of the jobs. `status_fd`: the nursery writes the worker's exit code there."""
        self.sock = sock
        self.pid = 0
        """0 until the worker has begun."""
        self._pidfd = -1
        self.status_fd = status_fd
        """Readable when the nursery has told how the worker has ended."""
        self._unread = bytearray()

    def fileno(self) -> int:
        """The descriptor that is readable when `take_answers` has something to do."""
        return self.sock.fileno()

    def send(self, body: bytes, seconds: float) -> None:
        """Send a job that may take so many seconds of the processor; waits while the worker's socket is full.

        An error is not reported here: `take_answers` does.
        """
        try:
            self.sock.sendall(REQUEST.pack(seconds, len(body)) + body)
        except ConnectionError:
            pass
        except TimeoutError:  # it is stopped
            self.kill()

    @property
    def has_ended(self) -> bool:
        """Whether the worker has ended and all its answers were taken; never waits if the socket does not block."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def take_answers(self, status_seconds: float = STATUS_SECONDS) -> list[bytes]:
        """The answers that have come, without waiting if the socket is readable.

        `status_seconds`: how long to wait for the nursery to tell how the worker has ended.

        Raises:
            WorkerEnded: the worker has ended.
            RuntimeError: the service failed; the message is its traceback.
        """
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self.sock.recv(1 << 20)
        if not data:
            raise WorkerEnded(self._find_limit(status_seconds))
        self._unread += data
        if self.pid == 0 and len(self._unread) >= PID.size:
            (self.pid,) = PID.unpack_from(self._unread)
            del self._unread[: PID.size]
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(self.pid)
        answers: list[bytes] = []
        while self.pid and len(self._unread) >= ANSWER.size:
            failed, size = ANSWER.unpack_from(self._unread)
            if len(self._unread) < ANSWER.size + size:
                break
            body = bytes(self._unread[ANSWER.size : ANSWER.size + size])
            del self._unread[: ANSWER.size + size]
            if failed:
                raise RuntimeError(f"a job in a sandbox failed\n{body.decode()}")
            answers.append(body)
        return answers

    def _find_limit(self, seconds: float) -> Limit:
        """Why the worker has ended."""
        poll = select.poll()
        poll.register(self.status_fd, select.POLLIN)
        code = os.read(self.status_fd, PID.size) if poll.poll(1000 * seconds) else b""
        return limit_from_exit(PID.unpack(code)[0]) if code else Limit.UNKNOWN

    def yield_processor(self, nice: int = 19) -> None:
        """Run the worker with this niceness; 19: only when nothing else wants the processor."""
        with contextlib.suppress(OSError):
            if self.pid:
                os.setpriority(os.PRIO_PROCESS, self.pid, nice)

    def kill(self) -> None:
        """Kill the worker, even in the middle of a job."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Give the worker up and kill it. One that has not begun ends when it does."""
        self.kill()
        self.sock.close()
        for fd in (self.status_fd, self._pidfd):
            if fd >= 0:
                os.close(fd)
