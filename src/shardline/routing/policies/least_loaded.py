"""The replica with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.routing.policies.base import Arrival, ReplicaLoad

USES_LOAD = True
USES_PREFIX = False
USES_WARM_CHUNKS = False


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`."""
    return min(replicas).number
