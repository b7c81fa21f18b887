"""The replica whose cache has most of the prompt, until that replica is saturated."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.routing.policies.base import Arrival, ReplicaLoad

USES_LOAD = True
USES_PREFIX = True
USES_WARM_CHUNKS = True


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`. A replica is saturated if a further request would wait. If all are, the least loaded one is
    chosen."""
    free = [replica for replica in replicas if replica.num_requests < replica.max_running]
    if not free:
        return min(replicas).number
    warmest = max(replica.warm_chunks for replica in free)
    return min(replica for replica in free if replica.warm_chunks == warmest).number
