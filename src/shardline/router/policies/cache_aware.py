"""The replica whose cache has most of the prompt, until that replica is saturated."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.router.policies.base import Arrival, ReplicaLoad, by_load

USES_LOAD = True
USES_PREFIX = True


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`. A replica is saturated if a further request would wait. If all are, the least loaded one is
    chosen."""
    free = [replica for replica in replicas if replica.num_requests < replica.max_running]
    if not free:
        return min(replicas, key=by_load).number
    return min(free, key=lambda replica: (-replica.warm_chunks, *by_load(replica))).number
