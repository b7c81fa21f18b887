"""One rank, in the engine's own process: no hop between plan and step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardline.engine.executor.base import Executor, ExecutorFailure, rank_steps
from shardline.engine.kv_budget import agreed_blocks
from shardline.runtime.messages import RankReport
from shardline.runtime.parallel.expert_load import Counts
from shardline.runtime.setup import ReplicaSetup, reserve_weights
from shardline.types import RankStep, StepPlan, StepResult

if TYPE_CHECKING:
    from shardline.runtime.pending import PendingStep
    from shardline.runtime.worker import Worker


class UniExecutor(Executor):
    """Runs a step when its result is asked for; on a GPU launches it at once, while the one before runs."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self._overlaps_steps = False
        self.max_in_flight = 1
        self._worker: Worker | None = None
        self._steps: deque[RankStep] = deque()
        """Not launched yet."""
        self._pending: deque[PendingStep] = deque()
        self._expert_load: Counts | None = None

    def start(self) -> list[RankReport]:
        reserve_weights(self._setup, 0)
        from shardline.runtime.backends import open_backend
        from shardline.runtime.parallel.groups import join_nobody
        from shardline.runtime.worker import Worker

        layout = self._setup.segment_layout
        parallel = self._setup.config.parallel
        assert parallel.cpu_threads is not None
        backend = open_backend(parallel.device, 0, parallel.cpu_threads)
        if backend.overlaps_steps:
            self._overlaps_steps, self.max_in_flight = True, self._setup.max_in_flight
        groups = join_nobody(layout.num_layers, layout.num_experts)
        self._expert_load = groups.expert_load
        self._worker = Worker(self._setup, backend, groups)
        return [self._worker.load(lambda memory: agreed_blocks(self._setup, [memory]))]

    def submit(self, plans: Sequence[StepPlan]) -> None:
        (step,) = rank_steps(plans)
        self._steps.append(step)
        if self._overlaps_steps:
            self._launch()

    def collect(self) -> list[StepResult]:
        if not self._overlaps_steps:
            self._launch()
        with _named_failure():
            result = self._pending.popleft().result()
        assert result is not None
        return [result]

    def _launch(self) -> None:
        assert self._worker is not None
        with _named_failure():
            self._pending.append(self._worker.launch_step(self._steps.popleft()))

    def expert_load(self) -> Counts:
        assert self._expert_load is not None
        return self._expert_load

    def close(self) -> None:
        self._worker = None


@contextmanager
def _named_failure() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ExecutorFailure(f"rank 0 failed: {type(error).__name__}: {error}") from error
