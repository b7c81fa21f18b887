"""Executors: one file for each way of running ranks; a deployment names one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardline.deployment.deployment import Deployment
from shardline.engine.executor.base import Executor


def make_executor(
    deployment: Deployment,
    engine: int = 0,
    streams: Mapping[int, int] = MappingProxyType({}),
) -> Executor:
    """The executor of one of the deployment's engines.

    `streams`: for each rank on another host, the descriptor of the socket that leads to it.
    """
    if deployment.executor == "uni":
        from shardline.engine.executor.uni import UniExecutor

        return UniExecutor(deployment, engine)
    if deployment.executor == "threads":
        from shardline.engine.executor.threads import ThreadExecutor

        return ThreadExecutor(deployment, engine)
    from shardline.engine.executor.multiprocess import MultiprocessExecutor

    return MultiprocessExecutor(deployment, engine, streams)
