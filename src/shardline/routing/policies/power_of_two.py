"""The less loaded one of two replicas that are drawn for the request (Mitzenmacher, 2001)."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.routing.policies.base import Arrival, ReplicaLoad

USES_LOAD = True
USES_PREFIX = False
USES_WARM_CHUNKS = False

_MASK = (1 << 64) - 1


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`. The draw is a hash of the request's number, so that the choice depends on nothing else."""
    if len(replicas) == 1:
        return replicas[0].number
    value = (arrival.number + 1) * 0x9E3779B97F4A7C15 & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = (value ^ (value >> shift)) * factor & _MASK  # the finalizer of splitmix64
    first = value % len(replicas)
    second = (first + 1 + (value >> 32) % (len(replicas) - 1)) % len(replicas)
    return min(replicas[first], replicas[second]).number
