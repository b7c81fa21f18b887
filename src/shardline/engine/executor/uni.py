"""One rank in the engine's own process, so that a plan reaches it without a message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardline.deployment.deployment import Deployment, KVAllocation
from shardline.deployment.kv_budget import MemoryUse, agree_allocation, fixed_allocation
from shardline.deployment.segment import segment_layout
from shardline.engine.executor.base import ControlAnswers, Executor, ExecutorFailure
from shardline.messages.control import Control
from shardline.messages.stats import RankTimes
from shardline.messages.step import RankStep, StepPlan, StepResult, rank_steps
from shardline.messages.worker import RankReport
from shardline.runtime.machines import open_backend, reserve_memory
from shardline.segment.expert_load import Counts

if TYPE_CHECKING:
    from shardline.runtime.parallel.groups import RankGroups
    from shardline.runtime.runner import PendingStep
    from shardline.runtime.worker import Worker


class UniExecutor(Executor):
    """Runs a step when its result is collected; a GPU's step is launched at once, while the previous one runs."""

    def __init__(self, deployment: Deployment, engine: int) -> None:
        self._deployment = deployment
        self._engine = engine
        self._overlaps_steps = False
        self.max_in_flight = 1
        self.answers = ControlAnswers(num_ranks=1)
        self._worker: Worker | None = None
        self._steps: deque[RankStep] = deque()
        """Submitted, but not launched yet."""
        self._pending: deque[PendingStep] = deque()
        self._groups: RankGroups | None = None

    def start(self) -> list[RankReport]:
        (weights,) = self._deployment.weights
        reserve_memory(weights.num_bytes, weights.touched_bytes)
        from shardline.runtime.parallel.groups import make_single_rank_groups
        from shardline.runtime.worker import Worker

        deployment = self._deployment
        place = deployment.placements[self._engine][0]
        layout = segment_layout(deployment, self._engine, place.host)
        backend = open_backend(deployment.device, 0, place.threads, deployment.kernels)
        if backend.overlaps_steps:
            self._overlaps_steps, self.max_in_flight = True, deployment.max_in_flight
        self._groups = groups = make_single_rank_groups(layout.num_layers, layout.num_experts)
        self._worker = worker = Worker(deployment, backend, groups, self._engine)
        return [worker.load(self._agree)]

    def _agree(self, memory: MemoryUse | None) -> KVAllocation:
        measured = [] if memory is None else [memory]
        self.allocation = fixed_allocation(self._deployment) or agree_allocation(self._deployment, measured)
        return self.allocation

    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        (step,) = rank_steps(plans)
        self._steps.append(step)
        if self._overlaps_steps:
            self._launch()

    def collect_results(self) -> list[StepResult]:
        if not self._pending:
            self._launch()
        with _named_failure():
            result = self._pending.popleft().result()
        assert result is not None
        return [result]

    def submit_control(self, control: Control) -> None:
        from shardline.runtime.control import execute_control

        assert self._worker is not None
        while self._steps:
            self._launch()
        self.answers.expect(control)
        with _named_failure():
            self.answers.add(0, execute_control(self._worker, control))

    def _launch(self) -> None:
        assert self._worker is not None
        with _named_failure():
            self._pending.append(self._worker.runner.launch_step(self._steps.popleft()))

    def expert_load(self) -> Counts:
        assert self._groups is not None
        return self._groups.expert_load

    def rank_times(self) -> list[RankTimes]:
        assert self._groups is not None
        return [self._groups.progress.read(0).times]

    def close(self) -> None:
        self._worker = None


@contextmanager
def _named_failure() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ExecutorFailure(f"rank 0 failed: {type(error).__name__}: {error}", suspicious=True) from error
