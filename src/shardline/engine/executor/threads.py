"""Ranks as threads of one process, so that a test can run all parallel layouts within minutes."""

from __future__ import annotations

import mmap
import queue
import threading
from collections import deque
from collections.abc import Sequence

from shardline.deployment.deployment import Deployment
from shardline.deployment.kv_budget import fixed_allocation
from shardline.deployment.messages import RankReport
from shardline.deployment.segment import segment_layout
from shardline.engine.executor.base import Executor, ExecutorFailure
from shardline.segment.expert_load import Counts, ExpertLoadBoard
from shardline.types import RankStep, StepPlan, StepResult, rank_steps


class ThreadExecutor(Executor):
    """The groups, the segment's layout and the workers are those of processes; only the memory is private."""

    def __init__(self, deployment: Deployment, engine: int) -> None:
        self._deployment = deployment
        self._engine = engine
        self._layout = segment_layout(deployment)
        self.max_in_flight = deployment.max_in_flight
        self._replies: queue.SimpleQueue[RankReport | tuple[int, StepResult] | Exception] = queue.SimpleQueue()
        self._steps: list[queue.SimpleQueue[RankStep | None]] = []
        self._results: list[deque[StepResult]] = [deque() for _ in deployment.grid.drivers]
        self._threads: list[threading.Thread] = []
        self._load: ExpertLoadBoard | None = None

    def start(self) -> list[RankReport]:
        from shardline.runtime.backends.host.torch_detector import resolve_operators

        resolve_operators()
        allocation = fixed_allocation(self._deployment)
        assert allocation is not None, "threads compute on the CPU, where nothing is measured"
        self.allocation = allocation
        grid = self._deployment.grid
        segment = memoryview(mmap.mmap(-1, self._layout.num_bytes))
        self._load = self._layout.expert_load(segment)
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
        from shardline.runtime.parallel.groups import connect_shared_memory
        from shardline.runtime.worker import Worker

        try:
            deployment = self._deployment
            threads = deployment.placements[self._engine][rank].threads
            backend = open_backend(deployment.device, rank, threads)
            groups = connect_shared_memory(backend.kernels, segment, self._layout, rank, deployment.step_timeout)
            worker = Worker(deployment, backend, groups)
            self._replies.put(worker.load(lambda memory: self.allocation))
            while (step := steps.get()) is not None:
                result = worker.runner.run_step(step)
                if result is not None and rank in self._deployment.grid.drivers:
                    self._replies.put((rank, result))
        except Exception as error:  # carried to the engine's thread
            self._replies.put(error)

    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        steps = rank_steps(plans)
        for rank, queued in enumerate(self._steps):
            queued.put(steps[rank // self._deployment.grid.replica_size])

    def collect_results(self) -> list[StepResult]:
        while not all(self._results):
            reply = self._reply()
            assert isinstance(reply, tuple)
            rank, result = reply
            self._results[rank // self._deployment.grid.replica_size].append(result)
        return [results.popleft() for results in self._results]

    def _reply(self) -> RankReport | tuple[int, StepResult]:
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
        assert self._load is not None
        return self._load.total()

    def close(self) -> None:
        for steps in self._steps:
            steps.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
