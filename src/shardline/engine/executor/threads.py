"""Ranks as threads of one process, so that a test can run all parallel layouts within minutes."""

from __future__ import annotations

import functools
import mmap
import operator
import queue
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardline.deployment.deployment import Deployment
from shardline.deployment.kv_budget import fixed_allocation
from shardline.deployment.segment import segment_layout
from shardline.engine.executor.base import ControlAnswers, Executor, ExecutorFailure
from shardline.engine.executor.step_answers import StepAnswers
from shardline.messages.control import Control, ControlDone
from shardline.messages.stats import RankTimes
from shardline.messages.step import RankStep, StepPlan, StepResult, rank_steps
from shardline.messages.worker import RankReport
from shardline.segment.expert_load import Counts, ExpertLoadBoard
from shardline.segment.layout import SegmentLayout
from shardline.segment.progress import ProgressBoard

if TYPE_CHECKING:
    from shardline.runtime.parallel.groups import RankGroups
    from shardline.runtime.parallel.rendezvous import Meeting

_Reply = RankReport | tuple[int, StepResult | ControlDone]
"""What a rank has loaded, or the rank and its result or answer."""


class ThreadExecutor(Executor):
    """The groups, the layout of segments and the workers are those of processes; only the memory is private.

    Ranks that the deployment places on several hosts have a segment per host, and exchange tensors over loopback.
    """

    def __init__(self, deployment: Deployment, engine: int) -> None:
        self._deployment = deployment
        self._engine = engine
        self.max_in_flight = deployment.max_in_flight
        self.answers = ControlAnswers(deployment.grid.world_size)
        self._replies: queue.SimpleQueue[_Reply | Exception] = queue.SimpleQueue()
        self._steps: list[queue.SimpleQueue[RankStep | Control | None]] = []
        self._results = StepAnswers(deployment.grid)
        self._threads: list[threading.Thread] = []
        self._groups: list[RankGroups] = []
        self._load: list[ExpertLoadBoard] = []
        self._progress: list[ProgressBoard] = []

    def start(self) -> list[RankReport]:
        from shardline.runtime.machines.host.replay import resolve_operators
        from shardline.runtime.parallel.rendezvous import LocalStore, Meeting

        resolve_operators()
        allocation = fixed_allocation(self._deployment)
        assert allocation is not None, "threads compute on the CPU, where nothing is measured"
        self.allocation = allocation
        grid = self._deployment.grid
        segments = self._make_segments()
        meeting = Meeting(LocalStore(), "127.0.0.1", secrets.token_bytes(32), self._deployment.step_timeout)
        for rank in range(grid.world_size):
            steps: queue.SimpleQueue[RankStep | Control | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._run_rank, args=(rank, segments, meeting, steps), name=f"rank-{rank}", daemon=True
            )
            self._steps.append(steps)
            self._threads.append(thread)
            thread.start()
        reports = []
        for _ in range(grid.world_size):
            reply = self._reply()
            assert isinstance(reply, RankReport)
            reports.append(reply)
        return sorted(reports, key=lambda report: report.rank)

    def _make_segments(self) -> dict[int, tuple[SegmentLayout, memoryview]]:
        """The segment of each host."""
        segments = {}
        for host in {place.host for place in self._deployment.placements[self._engine]}:
            layout = segment_layout(self._deployment, self._engine, host)
            segment = memoryview(mmap.mmap(-1, layout.num_bytes))
            segments[host] = layout, segment
            self._load.append(layout.expert_load(segment))
            self._progress.append(layout.progress(segment))
        return segments

    def _run_rank(
        self,
        rank: int,
        segments: dict[int, tuple[SegmentLayout, memoryview]],
        meeting: Meeting,
        steps: queue.SimpleQueue[RankStep | Control | None],
    ) -> None:
        from shardline.runtime.control import execute_control
        from shardline.runtime.machines import open_backend
        from shardline.runtime.parallel.groups import connect_host_memory
        from shardline.runtime.worker import Worker

        try:
            deployment = self._deployment
            place = deployment.placements[self._engine][rank]
            layout, segment = segments[place.host]
            backend = open_backend(deployment.device, rank, place.threads, deployment.kernels)
            groups = connect_host_memory(backend.kernels, segment, layout, rank, deployment.step_timeout, meeting)
            self._groups.append(groups)
            worker = Worker(deployment, backend, groups, self._engine)
            self._replies.put(worker.load(lambda memory: self.allocation))
            is_driver = rank in deployment.grid.drivers
            while (step := steps.get()) is not None:
                if isinstance(step, Control):
                    self._replies.put((rank, execute_control(worker, step)))
                    continue
                result = worker.runner.run_step(step)
                if result is not None and (is_driver or result.copied is not None):
                    self._replies.put((rank, result))
        except Exception as error:  # carried to the engine's thread
            self._replies.put(error)

    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        self._results.expect(plans)
        steps = rank_steps(plans)
        for rank, queued in enumerate(self._steps):
            queued.put(steps[rank // self._deployment.grid.replica_size])

    def collect_results(self) -> list[StepResult]:
        while not self._results.has_oldest:
            self._take_reply()
        return self._results.take_oldest()

    def submit_control(self, control: Control) -> None:
        """Waits for the answers: nothing else would wake the engine for them."""
        self.answers.expect(control)
        for queued in self._steps:
            queued.put(control)
        while self.answers.missing(control.number):
            self._take_reply()

    def _take_reply(self) -> None:
        """Take a result or an answer of a rank."""
        reply = self._reply()
        assert isinstance(reply, tuple)
        rank, message = reply
        if isinstance(message, ControlDone):
            self.answers.add(rank, message)
        else:
            self._results.put(rank, message)

    def _reply(self) -> _Reply:
        try:
            reply = self._replies.get(timeout=self._deployment.step_timeout)
        except queue.Empty:
            raise ExecutorFailure("a step missed its deadline") from None
        if isinstance(reply, ValueError):
            raise reply
        if isinstance(reply, Exception):
            raise ExecutorFailure(f"a rank failed: {type(reply).__name__}: {reply}") from reply
        return reply

    def expert_load(self) -> Counts:
        return functools.reduce(operator.add, (board.total() for board in self._load))

    def rank_times(self) -> list[RankTimes]:
        times = [line.times for board in self._progress for line in board.read()]
        return sorted(times, key=lambda one: one.rank)

    def close(self) -> None:
        for steps in self._steps:
            steps.put(None)
        for groups in self._groups:
            groups.abort()  # a rank may wait for one that has failed, and would outlive the interpreter
        for thread in self._threads:
            thread.join(timeout=1.0)
