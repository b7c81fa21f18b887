"""Workers of one sandbox that are kept for the next jobs, for an event loop and for threads."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

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

    `run` is for one event loop at a time, `run_blocking` for any thread.
    """

    def __init__(self, sandbox: Sandbox, setup: Setup | None = None) -> None:
        self._sandbox = sandbox
        self._setup = setup
        self._turns = _Turns()
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
        turn = await self._turns.begin()
        worker: Worker | None = None
        timer: asyncio.TimerHandle | None = None
        keep = False
        loop = asyncio.get_running_loop()
        try:
            worker = (None if is_retry else self._take_idle()) or await self._fork()
            self._busy.add(worker)
            timer = loop.call_later(_SHORT_SECONDS, self._note_long, turn, worker)
            answer = await _exchange(worker, body, seconds)
            keep = not turn.is_long
            return answer
        finally:
            if timer is not None:
                timer.cancel()
            self._turns.end(turn)
            if worker is not None:
                self._put_back(worker, keep)

    def _note_long(self, turn: _Turn, worker: Worker) -> None:
        worker.yield_processor()
        self._turns.note_long(turn)

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


@dataclass(eq=False)
class _Turn:
    """One job's right to run."""

    is_long: bool = False


class _Turns:
    """Which jobs may run: they begin in order, a few short ones at once, and long ones beside them."""

    def __init__(self) -> None:
        self._num_short = self._num_long = 0
        self._waiting: deque[asyncio.Future[_Turn]] = deque()

    async def begin(self) -> _Turn:
        """Wait for a turn."""
        if not self._waiting and self._has_room:
            self._num_short += 1
            return _Turn()
        waiting: asyncio.Future[_Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.end(waiting.result())
            raise

    def note_long(self, turn: _Turn) -> None:
        """The job of this turn takes long: another one may begin."""
        turn.is_long = True
        self._num_short -= 1
        self._num_long += 1
        self._let_begin()

    def end(self, turn: _Turn) -> None:
        """The job of this turn has ended."""
        if turn.is_long:
            self._num_long -= 1
        else:
            self._num_short -= 1
        self._let_begin()

    @property
    def _has_room(self) -> bool:
        return self._num_short < _NUM_WORKERS and self._num_short + self._num_long < _MOST_WORKERS

    def _let_begin(self) -> None:
        while self._waiting and self._has_room:
            waiting = self._waiting.popleft()
            if not waiting.done():
                self._num_short += 1
                waiting.set_result(_Turn())


async def _begin(worker: Worker) -> bool:
    """Wait until a new worker has begun. False: its nursery has ended or is stuck."""
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    with contextlib.suppress(WorkerEnded):
        while worker.pid == 0 and await _wait_readable(worker.fileno(), deadline):
            worker.take_answers(0.0)
    return worker.pid != 0


async def _exchange(worker: Worker, body: bytes, seconds: float) -> bytes:
    """The answer of an idle worker to a job; see `Pool.run`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WALL_FACTOR * seconds
    unsent = memoryview(REQUEST.pack(seconds, len(body)) + body)
    with contextlib.suppress(ConnectionError):  # the worker has ended: `take_answers` says why
        while unsent:
            try:
                unsent = unsent[worker.sock.send(unsent) :]
            except BlockingIOError:
                if not await _wait(loop.add_writer, loop.remove_writer, worker.fileno(), deadline):
                    raise WorkerEnded(Limit.DEADLINE) from None
    while await _wait_readable(worker.fileno(), deadline):
        if worker.has_ended:
            await _wait_readable(worker.status_fd, loop.time() + STATUS_SECONDS)
        if answers := worker.take_answers(0.0):
            return answers[0]
    raise WorkerEnded(Limit.DEADLINE)


async def _wait_readable(fd: int, deadline: float) -> bool:
    loop = asyncio.get_running_loop()
    return await _wait(loop.add_reader, loop.remove_reader, fd, deadline)


async def _wait(
    add: Callable[[int, Callable[[asyncio.Future[bool], bool], None], asyncio.Future[bool], bool], object],
    remove: Callable[[int], object],
    fd: int,
    deadline: float,
) -> bool:
    """Wait until `fd` is ready. False: it was not before the deadline, in the loop's time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()
    add(fd, _set_result, ready, True)
    timer = loop.call_at(deadline, _set_result, ready, False)
    try:
        return await ready
    finally:
        timer.cancel()
        remove(fd)


def _set_result(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
