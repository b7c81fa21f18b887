"""One process per rank on this host; plans go over a socketpair each, tensors through a common segment."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from shardline.channel import Channel
from shardline.engine.children import describe_end
from shardline.engine.executor.base import Executor, ExecutorFailure
from shardline.runtime.messages import (
    RankFailed,
    RankReady,
    RankReport,
    RunStep,
    StartWorker,
    StepDone,
    WorkerReply,
)
from shardline.runtime.parallel.progress import ProgressBoard
from shardline.runtime.parallel.segment import SegmentLayout
from shardline.runtime.setup import ReplicaSetup
from shardline.types import StepPlan, StepResult

_FRAME_TIMEOUT = 10.0
"""Seconds in which a frame that has begun must be whole."""


class MultiprocessExecutor(Executor):
    """Starts the ranks, watches their pipes, names the one that dies or is late."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self.max_in_flight = setup.max_in_flight
        self._encoder = msgspec.msgpack.Encoder()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel[WorkerReply]] = []
        self._submitted: list[int] = []
        # An anonymous file is gone with its last user, however that ends: nothing to clean up in /dev/shm.
        self._segment_fd = os.memfd_create("shardline")
        os.ftruncate(self._segment_fd, SegmentLayout(setup.grid).num_bytes)
        self._segment = mmap.mmap(self._segment_fd, SegmentLayout(setup.grid).num_bytes)
        layout = SegmentLayout(setup.grid)
        self._progress = ProgressBoard(layout.progress(memoryview(self._segment)), setup.grid.world_size)
        self._store_folder = tempfile.mkdtemp(prefix="shardline-") if setup.collectives == "gloo" else None

    def start(self) -> list[RankReport]:
        for rank in range(self._setup.grid.world_size):
            self._spawn(rank)
        reports: dict[int, RankReport] = {}
        while len(reports) < len(self._channels):
            waiting = [rank for rank in range(len(self._channels)) if rank not in reports]
            for rank in self._readable(waiting, timeout=None):
                reply = self._receive(rank)
                if isinstance(reply, RankReady):
                    reports[rank] = reply.report
        return [reports[rank] for rank in sorted(reports)]

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "shardline.runtime.worker_process",
            str(theirs.fileno()),
            str(self._segment_fd),
        ]
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno(), self._segment_fd], stdin=subprocess.DEVNULL)
        self._processes.append(process)
        # A worker reads at once whatever it is doing; one that does not has stopped, and must not stop the engine.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_FRAME_TIMEOUT), 0))
        channel: Channel[WorkerReply] = Channel(ours, WorkerReply)  # type: ignore[arg-type]
        self._channels.append(channel)
        store = str(Path(self._store_folder) / "store") if self._store_folder else ""
        channel.send(StartWorker(self._setup.config, rank, store))

    def submit(self, plan: StepPlan) -> None:
        message = self._encoder.encode(RunStep(plan))
        self._submitted.append(plan.step_id)
        for rank, channel in enumerate(self._channels):
            try:
                channel.send_encoded(message)
            except OSError:
                self._receive(rank)
                raise ExecutorFailure(self._death(rank)) from None

    def collect(self) -> StepResult:
        deadline = time.monotonic() + self._setup.config.parallel.step_timeout
        while True:
            ready = self._readable(range(len(self._channels)), max(0.0, deadline - time.monotonic()))
            for rank in ready:
                reply = self._receive(rank)
                if isinstance(reply, StepDone):
                    self._submitted.pop(0)
                    return reply.result
            if not ready:
                raise ExecutorFailure(self._missed_deadline())

    def watched(self) -> list[int]:
        return [channel.fileno() for channel in self._channels]

    def check(self) -> None:
        for rank in self._readable(range(len(self._channels)), 0.0):
            self._receive(rank)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._store_folder is not None:
            shutil.rmtree(self._store_folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._segment_fd)

    def _readable(self, ranks: range | list[int], timeout: float | None) -> list[int]:
        fds = {self._channels[rank].fileno(): rank for rank in ranks}
        ready, _, _ = select.select(list(fds), [], [], timeout)
        return [fds[fd] for fd in ready]

    def _receive(self, rank: int) -> WorkerReply:
        try:
            reply = self._channels[rank].receive(_FRAME_TIMEOUT)
        except (EOFError, OSError, TimeoutError, msgspec.MsgspecError):
            raise ExecutorFailure(self._death(rank)) from None
        if isinstance(reply, RankFailed):
            if reply.user_error:
                raise ValueError(reply.message)
            raise ExecutorFailure(f"{self._name(rank)} failed{self._at_step()}: {reply.message}")
        return reply

    def _name(self, rank: int) -> str:
        return f"{self._setup.grid.place(rank)} on {socket.gethostname()}, pid {self._processes[rank].pid},"

    def _at_step(self) -> str:
        return f" at step {self._submitted[0]}" if self._submitted else ""

    def _death(self, rank: int) -> str:
        return f"{self._name(rank)} {describe_end(self._processes[rank])}{self._at_step()}"

    def _missed_deadline(self) -> str:
        step = self._submitted[0]
        late = self._progress.late_ranks(step)
        names = "; ".join(self._name(rank).rstrip(",") for rank in late) or "no rank"
        return (
            f"step {step} missed its deadline of {self._setup.config.parallel.step_timeout:g} s; "
            f"did not arrive: {names}"
        )
