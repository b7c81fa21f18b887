"""Workers of one sandbox that are kept for the next jobs, for an event loop and for threads."""

from __future__ import annotations

import asyncio
import contextlib
import weakref

from shardline.sandbox.blocking import (
    NICE,
    START_SECONDS,
    WALL_FACTOR,
    Setup,
    exchange_blocking,
    fork_blocking,
)
from shardline.sandbox.client import Sandbox
from shardline.sandbox.confinement import Limit
from shardline.sandbox.nursery import REQUEST
from shardline.sandbox.worker import STATUS_SECONDS, Worker, WorkerEnded

_NUM_WORKERS = 4
"""Short jobs at once, and workers that are kept for later jobs."""
_MOST_WORKERS = 16
"""Jobs at once. Long jobs do not count as short ones, so that no client makes others wait with a few of them."""
_SHORT_SECONDS = 0.05
"""A job that takes longer is a long one: it runs when nothing else wants the processor."""


class Pool:
    """Runs jobs in the workers of a sandbox; a worker that ends costs its own job and is replaced.

    `run` is for one event loop, `run_blocking` for any thread.
    """

    def __init__(self, sandbox: Sandbox, setup: Setup | None = None) -> None:
        self._sandbox = sandbox
        self._setup = setup
        # Jobs begin in order: each has a turn of all jobs before it waits for one of the short ones.
        self._turns, self._short_turns = asyncio.Semaphore(_MOST_WORKERS), asyncio.Semaphore(_NUM_WORKERS)
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._finalizer = weakref.finalize(self, _close_workers, self._idle, self._busy)

    async def start(self) -> None:
        """Have a worker ready, so that the first job need not wait for one.

        Raises:
            RuntimeError: the sandbox does not start.
        """
        self._put_back(await self._fork(), keep=True)

    async def run(self, body: bytes, seconds: float) -> bytes:
        """The answer to a job. Jobs begin in the order in which they come; cancelling one kills its worker.

        `seconds`: how long it may run on the processor.

        Raises:
            WorkerEnded: the job has hit a limit.
            RuntimeError: the service failed, or the sandbox does not start.
        """
        try:
            return await self._run_once(body, seconds)
        except WorkerEnded as ended:
            if ended.limit is not Limit.UNKNOWN or not self._finalizer.alive:
                raise
        return await self._run_once(body, seconds, is_retry=True)  # somebody else has killed the worker

    def run_blocking(self, body: bytes, seconds: float) -> bytes:
        """As `run`, for threads; it begins at once."""
        try:
            return self._run_once_blocking(body, seconds)
        except WorkerEnded as ended:
            if ended.limit is not Limit.UNKNOWN or not self._finalizer.alive:
                raise
        return self._run_once_blocking(body, seconds, is_retry=True)

    def close(self) -> None:
        """End all workers, also in the middle of their jobs. The sandbox stays open."""
        self._finalizer()

    async def _run_once(self, body: bytes, seconds: float, is_retry: bool = False) -> bytes:
        async with self._turns:
            await self._short_turns.acquire()
            is_short, keep = True, False
            worker: Worker | None = None
            timer: asyncio.TimerHandle | None = None

            def note_long(worker: Worker) -> None:
                nonlocal is_short
                is_short = False
                worker.yield_processor()
                self._short_turns.release()

            try:
                worker = (None if is_retry else self._take_idle()) or await self._fork()
                self._busy.add(worker)
                timer = asyncio.get_running_loop().call_later(_SHORT_SECONDS, note_long, worker)
                answer = await _exchange(worker, body, seconds)
                keep = is_short
                return answer
            finally:
                if timer is not None:
                    timer.cancel()
                if is_short:
                    self._short_turns.release()
                if worker is not None:
                    self._put_back(worker, keep)

    def _run_once_blocking(self, body: bytes, seconds: float, is_retry: bool = False) -> bytes:
        worker = (None if is_retry else self._take_idle()) or fork_blocking(self._sandbox, self._setup)
        self._busy.add(worker)
        keep = False
        try:
            answer = exchange_blocking(worker, body, seconds)
            keep = True
            return answer
        finally:
            self._put_back(worker, keep)

    def _take_idle(self) -> Worker | None:
        with contextlib.suppress(IndexError):
            while True:
                worker = self._idle.pop()  # threads may do the same
                if not worker.has_ended:
                    return worker
                worker.close()
        return None

    def _put_back(self, worker: Worker, keep: bool) -> None:
        self._busy.discard(worker)
        if keep and len(self._idle) < _NUM_WORKERS and self._finalizer.alive:
            worker.sock.setblocking(False)
            self._idle.append(worker)
        else:
            worker.close()

    async def _fork(self) -> Worker:
        """A worker that has done its setup."""
        loop = asyncio.get_running_loop()
        for _ in range(2):
            if not self._sandbox.has_started:
                await loop.run_in_executor(None, self._sandbox.start)
            worker, nursery = self._sandbox.fork(), self._sandbox.pid
            worker.sock.setblocking(False)
            try:
                if await _begin(worker):
                    worker.yield_processor(NICE)
                    if self._setup is not None:
                        await _exchange(worker, self._setup.body, self._setup.seconds)
                    return worker
            except BaseException:
                worker.close()
                raise
            worker.close()
            await loop.run_in_executor(None, self._sandbox.close, nursery)
        raise RuntimeError("a sandbox does not start")


def _close_workers(idle: list[Worker], busy: set[Worker]) -> None:
    while idle:
        idle.pop().close()
    for worker in list(busy):
        worker.kill()  # whoever waits for it closes it


async def _begin(worker: Worker) -> bool:
    """Wait until a new worker has begun. False: its nursery has ended or is stuck."""
    with contextlib.suppress(WorkerEnded, TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while worker.pid == 0:
                await _wait_readable(worker.fileno())
                worker.take_answers(0.0)
    return worker.pid != 0


async def _exchange(worker: Worker, body: bytes, seconds: float) -> bytes:
    """The answer of an idle worker to a job; see `Pool.run`."""
    try:
        async with asyncio.timeout(WALL_FACTOR * seconds):
            with contextlib.suppress(ConnectionError):  # the worker has ended: `take_answers` says why
                job = REQUEST.pack(seconds, len(body)) + body
                await asyncio.get_running_loop().sock_sendall(worker.sock, job)
            while True:
                await _wait_readable(worker.fileno())
                if worker.has_ended:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(STATUS_SECONDS):
                            await _wait_readable(worker.status_fd)
                if answers := worker.take_answers(0.0):
                    return answers[0]
    except TimeoutError:
        raise WorkerEnded(Limit.DEADLINE) from None


async def _wait_readable(fd: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
