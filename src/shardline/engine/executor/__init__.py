"""Executors: one file per way of placing ranks, chosen by name."""

from __future__ import annotations

from shardline.engine.executor.base import Executor
from shardline.runtime.setup import ReplicaSetup


def make_executor(setup: ReplicaSetup) -> Executor:
    """The executor that the resolved configuration asks for."""
    backend = setup.config.parallel.distributed_executor_backend
    if backend == "uni":
        from shardline.engine.executor.uni import UniExecutor

        return UniExecutor(setup)
    if backend == "threads":
        from shardline.engine.executor.threads import ThreadExecutor

        return ThreadExecutor(setup)
    from shardline.engine.executor.multiprocess import MultiprocessExecutor

    return MultiprocessExecutor(setup)
