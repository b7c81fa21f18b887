"""`python -m shardline.runtime.worker_process SOCKET_FD SEGMENT_FD`: one rank as a process of its own."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

from shardline.channel import Channel
from shardline.log import configure_logging
from shardline.runtime.messages import RankFailed, RankReady, RunStep, StartWorker, StepDone, WorkerRequest
from shardline.types import StepPlan

_log = logging.getLogger(__name__)


def serve_rank(channel: Channel[WorkerRequest], segment: memoryview) -> None:
    """Load, then run plans until the engine ends."""
    start = channel.receive()
    assert isinstance(start, StartWorker)
    try:
        _serve(channel, segment, start)
    except Exception as error:
        user_error = isinstance(error, ValueError)
        if not user_error:
            _log.error("rank %d failed\n%s", start.rank, traceback.format_exc())
        message = str(error) if user_error else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            channel.send(RankFailed(start.rank, message, user_error))


def _serve(channel: Channel[WorkerRequest], segment: memoryview, start: StartWorker) -> None:
    plans: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
    threading.Thread(target=_read_plans, args=(channel, plans), daemon=True).start()

    # The reader is up before this: an engine that ends while torch is being imported ends its workers too.
    from shardline.runtime.parallel.groups import join_gloo, join_shared
    from shardline.runtime.setup import prepare
    from shardline.runtime.worker import Worker

    setup = prepare(start.config)
    # The engine's deadline comes first, since it can say which rank is late; this is the back-stop.
    timeout = 2 * setup.config.parallel.step_timeout + 5.0
    if start.store_path:
        groups = join_gloo(Path(start.store_path), segment, setup.grid, start.rank, timeout)
    else:
        groups = join_shared(segment, setup.grid, start.rank, timeout)
    worker = Worker(setup, groups)
    channel.send(RankReady(worker.load()))
    while True:
        result = worker.run(plans.get())
        if result is not None and start.rank == setup.grid.driver:
            channel.send(StepDone(result))


def _read_plans(channel: Channel[WorkerRequest], plans: queue.SimpleQueue[StepPlan]) -> None:
    """Runs beside the steps, so that the engine's end is noticed even in the middle of an exchange."""
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError):
            os._exit(0)
        assert isinstance(message, RunStep)
        plans.put(message.plan)


def main() -> None:
    """Entry point; the file descriptors come from the engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging()
    sock = socket.socket(fileno=int(sys.argv[1]))
    segment_fd = int(sys.argv[2])
    segment = mmap.mmap(segment_fd, os.fstat(segment_fd).st_size)
    serve_rank(Channel(sock, WorkerRequest), memoryview(segment))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
