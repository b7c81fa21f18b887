"""Ranks as threads of one process: the whole parallel matrix runs in a test within minutes."""

from __future__ import annotations

import mmap
import queue
import threading
from collections import deque
from collections.abc import Sequence

from shardline.engine.executor.base import Executor, ExecutorFailure, rank_steps
from shardline.runtime.messages import RankReport
from shardline.runtime.parallel.expert_load import Counts, ExpertLoadBoard
from shardline.runtime.setup import ReplicaSetup
from shardline.types import RankStep, StepPlan, StepResult


class ThreadExecutor(Executor):
    """Same groups, same segment layout and same worker as with processes; only the memory is private."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self.max_in_flight = setup.max_in_flight
        self._replies: queue.SimpleQueue[RankReport | tuple[int, StepResult] | Exception] = queue.SimpleQueue()
        self._steps: list[queue.SimpleQueue[RankStep | None]] = []
        self._results: list[deque[StepResult]] = [deque() for _ in setup.grid.drivers]
        self._threads: list[threading.Thread] = []
        self._load: ExpertLoadBoard | None = None

    def start(self) -> list[RankReport]:
        from shardline.runtime.backends.host.replay import resolve_operators

        resolve_operators()
        grid = self._setup.grid
        layout = self._setup.segment_layout
        segment = memoryview(mmap.mmap(-1, layout.num_bytes))
        self._load = layout.expert_load(segment)
        for rank in range(grid.world_size):
            steps: queue.SimpleQueue[RankStep | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._run_rank, args=(rank, segment, steps), name=f"rank-{rank}", daemon=True
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

    def _run_rank(self, rank: int, segment: memoryview, steps: queue.SimpleQueue[RankStep | None]) -> None:
        from shardline.runtime.backends import open_backend
        from shardline.runtime.parallel.groups import join_shared
        from shardline.runtime.worker import Worker

        try:
            parallel = self._setup.config.parallel
            timeout, threads = parallel.step_timeout, parallel.cpu_threads
            assert threads is not None
            backend = open_backend(parallel.device, rank, threads)
            groups = join_shared(backend.kernels, segment, self._setup.segment_layout, rank, timeout)
            worker = Worker(self._setup, backend, groups)
            self._replies.put(worker.load())
            while (step := steps.get()) is not None:
                result = worker.run_step(step)
                if result is not None and rank in self._setup.grid.drivers:
                    self._replies.put((rank, result))
        except Exception as error:  # carried to the engine's thread
            self._replies.put(error)

    def submit(self, plans: Sequence[StepPlan]) -> None:
        steps = rank_steps(plans)
        for rank, queued in enumerate(self._steps):
            queued.put(steps[rank // self._setup.grid.replica_size])

    def collect(self) -> list[StepResult]:
        while not all(self._results):
            reply = self._reply()
            assert isinstance(reply, tuple)
            rank, result = reply
            self._results[rank // self._setup.grid.replica_size].append(result)
        return [results.popleft() for results in self._results]

    def _reply(self) -> RankReport | tuple[int, StepResult]:
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
        for steps in self._steps:
            steps.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
