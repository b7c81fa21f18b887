"""Workers of a sandbox for threads, which wait for them."""

from __future__ import annotations

import contextlib
import select
from dataclasses import dataclass

from shardline.sandbox.client import Sandbox
from shardline.sandbox.confinement import Limit
from shardline.sandbox.worker import Worker, WorkerEnded

NICE = 5
"""The niceness of workers: requests that run already go first."""
WALL_FACTOR = 5
"""How much longer than its time on the processor a job may take: the machine may be busy."""
START_SECONDS = 15.0
"""A worker begins in this time, or its nursery is stuck."""


@dataclass(frozen=True)
class Setup:
    """A job that every worker does first. Its answer counts for nothing."""

    body: bytes
    seconds: float


def fork_blocking(sandbox: Sandbox, setup: Setup | None) -> Worker:
    """A worker that has done its setup.

    Raises:
        RuntimeError: the sandbox does not start.
    """
    for _ in range(2):
        worker, nursery = sandbox.fork(), sandbox.pid
        try:
            if _begin(worker):
                worker.yield_processor(NICE)
                if setup is not None:
                    exchange_blocking(worker, setup.body, setup.seconds)
                return worker
        except BaseException:
            worker.close()
            raise
        worker.close()
        sandbox.close(nursery)
    raise RuntimeError("a sandbox does not start")


def _begin(worker: Worker) -> bool:
    worker.sock.settimeout(START_SECONDS)
    with contextlib.suppress(WorkerEnded, TimeoutError):
        while worker.pid == 0:
            worker.take_answers(0.0)
    return worker.pid != 0


def exchange_blocking(worker: Worker, body: bytes, seconds: float) -> bytes:
    """The answer of an idle worker to a job; see `Pool.run`."""
    worker.sock.settimeout(WALL_FACTOR * seconds)
    try:
        worker.send(body, seconds)
    except TimeoutError:
        raise WorkerEnded(Limit.DEADLINE) from None
    return receive_blocking(worker, WALL_FACTOR * seconds)


def receive_blocking(worker: Worker, timeout: float) -> bytes:
    """The answer of the only job that was sent.

    Raises:
        WorkerEnded: the worker has ended, or has not answered in time and was killed.
        RuntimeError: the service failed; the message is its traceback.
    """
    while True:
        poll = select.poll()
        poll.register(worker.sock, select.POLLIN)
        if not poll.poll(1000 * timeout):
            worker.kill()
            raise WorkerEnded(Limit.DEADLINE)
        if answers := worker.take_answers():
            return answers[0]
