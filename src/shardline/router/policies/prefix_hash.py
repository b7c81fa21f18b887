"""Equal beginnings of prompts go to the same replica: a consistent hash, with a bound on the load.

Each replica has a random weight for each first chunk, and the heaviest takes the request (rendezvous hashing). So a
replica that leaves or joins moves only its own share of the prefixes. A replica with more than a fair share of the
requests passes on what is too much, so that one popular prefix does not overload it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline.router.policies.base import Arrival, ReplicaLoad, by_load

USES_LOAD = True
USES_PREFIX = True

_BOUND = 1.25
"""Times the mean number of requests that a replica may have."""
_MASK = (1 << 64) - 1


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`. Prompts without a full chunk go to the replica with the least load."""
    if not arrival.prefix:
        return min(replicas, key=by_load).number
    most = _BOUND * (1 + sum(replica.num_requests for replica in replicas)) / len(replicas)
    open_ones = [replica for replica in replicas if replica.num_requests + 1 <= most]
    key = arrival.prefix[0]
    return max(open_ones or replicas, key=lambda replica: _weight(key, replica.number)).number


def _weight(key: int, index: int) -> int:
    """A number that looks random (the finalizer of splitmix64)."""
    value = (key + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
