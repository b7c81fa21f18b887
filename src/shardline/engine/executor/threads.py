"""Ranks as threads of one process: the whole parallel matrix runs in a test within minutes."""

from __future__ import annotations

import mmap
import queue
import threading

from shardline.engine.executor.base import Executor, ExecutorFailure
from shardline.runtime.messages import RankReport
from shardline.runtime.parallel.expert_load import Counts, ExpertLoadBoard
from shardline.runtime.setup import ReplicaSetup
from shardline.types import StepPlan, StepResult


class ThreadExecutor(Executor):
    """Same groups, same segment layout and same worker as with processes; only the memory is private."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self.max_in_flight = setup.max_in_flight
        self._replies: queue.SimpleQueue[RankReport | StepResult | Exception] = queue.SimpleQueue()
        self._plans: list[queue.SimpleQueue[StepPlan | None]] = []
        self._threads: list[threading.Thread] = []
        self._load: ExpertLoadBoard | None = None

    def start(self) -> list[RankReport]:
        grid = self._setup.grid
        layout = self._setup.segment_layout
        segment = memoryview(mmap.mmap(-1, layout.num_bytes))
        self._load = layout.expert_load(segment)
        for rank in range(grid.world_size):
            plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._run_rank, args=(rank, segment, plans), name=f"rank-{rank}", daemon=True
            )
            self._plans.append(plans)
            self._threads.append(thread)
            thread.start()
        reports = []
        for _ in range(grid.world_size):
            reply = self._reply()
            assert isinstance(reply, RankReport)
            reports.append(reply)
        return sorted(reports, key=lambda report: report.rank)

    def _run_rank(self, rank: int, segment: memoryview, plans: queue.SimpleQueue[StepPlan | None]) -> None:
        from shardline.runtime.parallel.groups import join_shared
        from shardline.runtime.worker import Worker

        try:
            timeout = self._setup.config.parallel.step_timeout
            groups = join_shared(segment, self._setup.segment_layout, rank, timeout)
            worker = Worker(self._setup, groups)
            self._replies.put(worker.load())
            while (plan := plans.get()) is not None:
                result = worker.run(plan)
                if result is not None and rank == self._setup.grid.driver:
                    self._replies.put(result)
        except Exception as error:  # carried to the engine's thread
            self._replies.put(error)

    def submit(self, plan: StepPlan) -> None:
        for plans in self._plans:
            plans.put(plan)

    def collect(self) -> StepResult:
        reply = self._reply()
        assert isinstance(reply, StepResult)
        return reply

    def _reply(self) -> RankReport | StepResult:
        try:
            reply = self._replies.get(timeout=self._setup.config.parallel.step_timeout)
        except queue.Empty:
            raise ExecutorFailure("a step missed its deadline") from None
        if isinstance(reply, ValueError):
            raise reply
        if isinstance(reply, Exception):
            raise ExecutorFailure(f"a rank failed: {type(reply).__name__}: {reply}") from reply
        return reply

    def expert_load(self) -> Counts:
        assert self._load is not None
        return self._load.total()

    def close(self) -> None:
        for plans in self._plans:
            plans.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
