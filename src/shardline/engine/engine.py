"""The step loop: schedule, execute, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from shardline.engine.executor.base import Executor
from shardline.engine.expert_load import expert_load
from shardline.engine.scheduler import Scheduler
from shardline.runtime.setup import ReplicaSetup
from shardline.types import EngineStats, ExpertLoad, Request, SequenceOutput, StepPlan

_LOAD_SECONDS = 1.0
"""How old the load of experts may be while the engine is busy: adding it up takes longer than all other counters."""


class Engine:
    """One replica: a scheduler and the executor that runs its plans."""

    def __init__(self, setup: ReplicaSetup, executor: Executor) -> None:
        self._setup = setup
        self._executor = executor
        self._scheduler = Scheduler(
            setup.config.scheduler,
            setup.config.cache,
            setup.groups,
            setup.num_blocks,
            setup.max_model_len,
            max_in_flight=executor.max_in_flight,
            last_token_known=setup.grid.pipeline > 1,
        )
        self._in_flight: deque[StepPlan] = deque()
        self._engine_seconds = 0.0
        self._expert_load: ExpertLoad | None = None
        self._expert_load_time = 0.0

    @property
    def busy(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._in_flight) or self._scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._scheduler.add(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def step(self) -> list[SequenceOutput]:
        """Keep the executor's pipeline full, wait for its oldest step and say what that produced.

        Raises:
            ExecutorFailure: a rank died, failed or missed its deadline.
        """
        started = time.perf_counter()
        while len(self._in_flight) < self._executor.max_in_flight:
            plan = self._scheduler.schedule()
            if plan is None:
                break
            self._executor.submit(plan)
            self._in_flight.append(plan)
        waited = 0.0
        if not self._in_flight:
            outputs = self._scheduler.take_outputs()
        else:
            before = time.perf_counter()
            result = self._executor.collect()
            waited = time.perf_counter() - before
            outputs = self._scheduler.update(self._in_flight.popleft(), result)
        self._engine_seconds += time.perf_counter() - started - waited
        return outputs

    def stats(self) -> EngineStats:
        """Counters since the start, gauges of now."""
        now = time.monotonic()
        if self._setup.num_experts and (not self.busy or now - self._expert_load_time > _LOAD_SECONDS):
            setup = self._setup
            counts = self._executor.expert_load()
            self._expert_load = expert_load(counts, setup.grid, setup.stages, setup.expert_parallel)
            self._expert_load_time = now
        return msgspec.structs.replace(
            self._scheduler.stats(), engine_seconds=self._engine_seconds, experts=self._expert_load
        )
