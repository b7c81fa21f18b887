"""Each replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.routing.policies.base import Arrival, ReplicaLoad

USES_LOAD = False
USES_PREFIX = False
USES_WARM_CHUNKS = False


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`."""
    return replicas[arrival.number % len(replicas)].number
