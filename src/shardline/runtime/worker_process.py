"""One rank as a separate process, started by engine.children with the arguments SOCKET_FD, SEGMENT_FD and PULSE_FD."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardline import env
from shardline.channel import Channel
from shardline.deployment.deployment import KVAllocation
from shardline.deployment.kv_budget import MemoryUse
from shardline.deployment.segment import segment_layout
from shardline.log import configure_logging
from shardline.messages.control import Control
from shardline.messages.step import RankStep
from shardline.messages.worker import (
    AllocateCache,
    RankFailed,
    RankMeasured,
    RankReady,
    RankReport,
    RunStep,
    StartWorker,
    StepDone,
    StepReply,
    StepRequest,
    StoreCount,
    StoreValue,
    WorkerRequest,
)
from shardline.process_title import set_process_title
from shardline.runtime.control import execute_control
from shardline.runtime.control_store import ControlStore
from shardline.runtime.machines import open_backend, reserve_memory
from shardline.segment.pulse import note_work, start_pulse

if TYPE_CHECKING:
    from shardline.runtime.runner import PendingStep
    from shardline.runtime.worker import Agree, Worker

    _Event = RankStep | PendingStep | Control
    """What the thread that runs steps waits for: a plan, a step that is over, or a command."""

_LONGEST_WAIT = 600.0
"""Seconds that a rank waits for another one beyond the engine's deadline: the other may compute for long."""
_END_SECONDS = 2.0
"""Seconds in which the channel to the engine ends after the line to it, if the engine itself has ended."""
_log = logging.getLogger(__name__)


def serve_rank(channel: Channel[WorkerRequest], segment: memoryview) -> None:
    """Load, then run plans until the engine ends. A failure is reported to the engine in words."""
    start = channel.receive()
    assert isinstance(start, StartWorker)
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    allocations: queue.SimpleQueue[KVAllocation] = queue.SimpleQueue()
    # The reader starts before torch is imported, so that an engine that ends meanwhile also ends its workers.
    store = ControlStore(channel.send)
    threading.Thread(target=_read_messages, args=(channel, events, allocations, store), daemon=True).start()

    def agree(memory: MemoryUse | None) -> KVAllocation:
        if memory is not None:
            channel.send(RankMeasured(memory))
        return allocations.get()

    loaded = False
    answer: Callable[[StepReply], None] = channel.send
    try:
        if start.step_address:
            answer = _open_line(start, events)
        gc.disable()  # imported and loaded objects stay alive, and scanning them would take a tenth of the time
        worker, report, is_driver = _load(start, segment, agree, store)
        channel.send(RankReady(report))
        loaded = True
        gc.freeze()
        gc.enable()
        launched: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()
        threading.Thread(target=_await_steps, args=(launched, events), daemon=True).start()
        launch_step = worker.runner.launch_step
        while True:
            event = events.get()
            if isinstance(event, Control):
                answer(execute_control(worker, event))
                continue
            pending = launch_step(event) if isinstance(event, RankStep) else event
            note_work()  # kernels of a GPU do not count themselves
            if isinstance(event, RankStep) and not pending.is_over:
                launched.put(pending)
            elif (result := pending.result()) is not None and (is_driver or result.copied is not None):
                answer(StepDone(result))
    except Exception as error:
        if channel.peer_has_ended():
            return
        user_error = isinstance(error, ValueError) and not loaded
        consequence = isinstance(error, (ConnectionError, TimeoutError))
        if not user_error:
            _log.error("rank %d failed\n%s", start.rank, traceback.format_exc())
        message = str(error) if user_error else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            channel.send(RankFailed(start.rank, message, user_error, consequence))


def _open_line(start: StartWorker, events: queue.SimpleQueue[_Event]) -> Callable[[StepReply], None]:
    """Connect to the engine on another host, for steps. Its messages become events; returns what sends the answers.

    Raises:
        TimeoutError: the engine cannot be reached.
    """
    from shardline.runtime.parallel.rendezvous import connect_to_engine

    sock, seal = connect_to_engine(start.step_address, start.nonce, start.rank, start.deployment.connect_timeout)
    line: Channel[StepRequest] = Channel(sock, StepRequest, seal)  # type: ignore[arg-type]
    threading.Thread(target=read_line, args=(line, events), daemon=True).start()

    def send(message: StepReply) -> None:
        with contextlib.suppress(OSError):  # the thread that reads ends this process
            line.send(message)

    return send


def _load(
    start: StartWorker, segment: memoryview, agree: Agree, store: ControlStore
) -> tuple[Worker, RankReport, bool]:
    here = start.deployment.placements[start.engine][start.rank]
    deployment = start.deployment.seen_from(here.host)
    layout = segment_layout(deployment, start.engine, here.host)
    place, weights = deployment.grid.place(start.rank), deployment.weights[start.rank]
    replica = start.engine * deployment.grid.data + place.dp_rank
    title = f"rank {place.rank} (dp {replica} pp {place.pp_rank} tp {place.tp_rank})"
    set_process_title(f"{deployment.role} {title}".strip())
    # Start this before torch is imported: the import takes long enough to touch most of the memory.
    reserve_memory(weights.num_bytes, weights.touched_bytes)
    from shardline.runtime.parallel.groups import connect_distributed, connect_host_memory
    from shardline.runtime.parallel.interface import interface_of
    from shardline.runtime.parallel.rendezvous import Meeting
    from shardline.runtime.parallel.torch_store import TorchStore
    from shardline.runtime.worker import Worker

    # The engine finds a stall first, and can name the late rank. This is the fallback.
    timeout = 2 * deployment.step_timeout + _LONGEST_WAIT
    backend = open_backend(
        deployment.device, deployment.local_rank(start.engine, start.rank), here.threads, deployment.kernels
    )
    address = deployment.machine.hosts[here.host].address
    if deployment.collectives != "shm":
        if deployment.remote_ranks(start.engine):
            env.use_interface(interface_of(address))
        groups = connect_distributed(
            backend,
            deployment.collectives,
            TorchStore(store, deployment.connect_timeout),
            segment,
            layout,
            start.rank,
            timeout,
            make_small_gather=backend.make_small_gather if deployment.tries_symmetric_memory else None,
        )
    else:
        meeting = Meeting(store, address, start.nonce, deployment.connect_timeout)
        groups = connect_host_memory(backend.kernels, segment, layout, start.rank, timeout, meeting)
    if deployment.grid.world_size > 1:
        threading.Thread(target=groups.progress.sample_waiting, name="waiting", daemon=True).start()

    def share(own: bytes) -> list[bytes]:
        return store.share("kernels", own, start.rank, deployment.grid.world_size, timeout)

    worker = Worker(deployment, backend, groups, start.engine, share)
    report = worker.load(agree)
    return worker, report, start.rank in deployment.grid.drivers


def _await_steps(launched: queue.SimpleQueue[PendingStep], events: queue.SimpleQueue[_Event]) -> None:
    """Waits for the device in a thread of its own, so that the main thread launches each plan as soon as it arrives."""
    while True:
        pending = launched.get()
        with contextlib.suppress(Exception):  # `result` raises it again
            pending.wait()
        events.put(pending)


def read_line(line: Channel[StepRequest], events: queue.SimpleQueue[_Event]) -> None:
    """Turn what comes over the line to the engine into events, until it ends. Runs in a thread of its own."""
    try:
        while True:
            message = line.receive()
            events.put(message.step if isinstance(message, RunStep) else message)
    except (EOFError, OSError):
        time.sleep(_END_SECONDS)  # if the engine has ended, the channel ends too, and with it this process
        _log.error("the connection over which the engine sends its steps has ended")
        os._exit(1)
    except BaseException:
        _log.exception("the engine sent a message that cannot be read")
        os._exit(1)


def _read_messages(
    channel: Channel[WorkerRequest],
    events: queue.SimpleQueue[_Event],
    allocations: queue.SimpleQueue[KVAllocation],
    store: ControlStore,
) -> None:
    """Runs in a thread of its own, so that the engine's end is noticed even in the middle of an exchange."""
    try:
        while True:
            message = channel.receive()
            if isinstance(message, AllocateCache):
                allocations.put(message.allocation)
            elif isinstance(message, Control):
                events.put(message)
            elif isinstance(message, (StoreValue, StoreCount)):
                store.put_answer(message)
            else:
                assert isinstance(message, RunStep)
                events.put(message.step)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        _log.exception("the engine sent a message that cannot be read")
        os._exit(1)


def main() -> None:
    """Entry point; the file descriptors come from the engine."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel_fd, segment_fd, pulse = map(int, sys.argv[1:])
    start_pulse(pulse)
    configure_logging()
    sock = socket.socket(fileno=channel_fd)
    segment = mmap.mmap(segment_fd, os.fstat(segment_fd).st_size)
    serve_rank(Channel(sock, WorkerRequest), memoryview(segment))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
