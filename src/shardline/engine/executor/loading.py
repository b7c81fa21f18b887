"""How ranks load: what they report, how they agree on the KV pool, and which of them is stuck."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from shardline.channel import encode_message
from shardline.deployment.deployment import Deployment, KVAllocation
from shardline.deployment.kv_budget import MemoryUse, agree_allocation, fixed_allocation
from shardline.engine.executor.base import ExecutorFailure
from shardline.engine.executor.rank_processes import RankProcesses
from shardline.engine.executor.rank_store import RankStore
from shardline.engine.watchdog import LOOK_SECONDS, LoadWatch
from shardline.messages.worker import AllocateCache, RankMeasured, RankReady, RankReport, WorkerReply
from shardline.segment.pulse import note_work
from shardline.segment.pulse_watch import CHECK_INTERVAL

_LOADING_NOTICE = 30.0
"""Seconds of loading after which the log names the ranks that are not ready, again and again."""

_log = logging.getLogger(__name__)


def load_ranks(
    deployment: Deployment,
    processes: RankProcesses,
    send_to_all: Callable[[bytes], None],
    receive: Callable[[float], Iterable[tuple[int, WorkerReply]]],
    store: RankStore,
) -> tuple[list[RankReport], KVAllocation]:
    """Wait until the ranks, which have been started, have loaded. `store`: where they find each other.

    Returns their reports, in their order, and the size of the KV pool. Errors are those of `Executor.start`.
    """
    everybody = range(deployment.grid.world_size)
    allocation = fixed_allocation(deployment)
    if allocation is not None:
        send_to_all(encode_message(AllocateCache(allocation)))
    reports: dict[int, RankReport] = {}
    measured: dict[int, MemoryUse] = {}
    watch, noticed, looked = LoadWatch(), time.monotonic(), time.monotonic()
    while len(reports) < len(everybody):
        for rank, reply in receive(CHECK_INTERVAL):
            if isinstance(reply, RankReady):
                reports[rank] = reply.report
            elif isinstance(reply, RankMeasured):
                measured[rank] = reply.memory
                if len(measured) == len(everybody):
                    allocation = agree_allocation(deployment, [measured[rank] for rank in everybody])
                    send_to_all(encode_message(AllocateCache(allocation)))
        now = time.monotonic()
        if now - looked >= LOOK_SECONDS:
            looked = now
            if watch.look(processes.activities()):
                note_work()  # for the front, which watches this process
            elif watch.is_stuck:
                done = measured if len(measured) < len(everybody) else ()
                innocent = {*reports, *done, *store.waiting}  # ready, or waiting for others
                stuck = [rank for rank in everybody if rank not in innocent] or list(everybody)
                raise ExecutorFailure(
                    f"{processes.name_ranks(stuck)}: no progress in loading for {watch.patience:g} s: nothing was "
                    "read, computed or finished"
                )
        if now - noticed >= _LOADING_NOTICE:
            noticed = now
            _log.info("still loading: %s", processes.name_ranks([rank for rank in everybody if rank not in reports]))
    assert allocation is not None, "ranks are ready only once they know the size of the pool"
    return [reports[rank] for rank in everybody], allocation
