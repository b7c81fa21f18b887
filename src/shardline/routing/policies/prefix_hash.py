"""Equal beginnings of prompts go to the same replica: a consistent hash, with a bound on the load.

Each replica has a random weight for each first chunk, and the heaviest takes the request (rendezvous hashing). So a
replica that leaves or joins moves only its own share of the prefixes. A replica with more than a fair share of the
requests passes on what is too much, so that one popular prefix does not overload it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardline.routing.policies.base import Arrival, ReplicaLoad

USES_LOAD = True
USES_PREFIX = True
USES_WARM_CHUNKS = False

_BOUND = 1.25
"""Times the mean number of requests that a replica may have."""
_MASK = (1 << 64) - 1


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`. Prompts without a full chunk go to the replica with the least load."""
    if not arrival.prefix:
        return min(replicas).number
    bound = _BOUND * (1 + sum(replica.num_requests for replica in replicas)) / len(replicas)
    numbers = [replica.number for replica in replicas if replica.num_requests + 1 <= bound]
    numbers = numbers or [replica.number for replica in replicas]
    return numbers[int(_weights(arrival.prefix[0], numbers).argmax())]


def _weights(key: int, numbers: list[int]) -> NDArray[np.uint64]:
    """For each replica a number that looks random (the finalizer of splitmix64)."""
    value = (np.array(numbers, dtype=np.uint64) + 1) * 0x9E3779B97F4A7C15 + np.uint64(key & _MASK)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(value, dtype=np.uint64)
