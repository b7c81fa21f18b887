"""The replica with the least work before the request's first token: its own prompt, and what others already ask for.

A prompt that a replica has seen is no work there, so a conversation stays with its cache until waiting for the replica
costs more than computing the prompt again elsewhere. What is ahead of it is the prompts that are not computed yet, and
a step for every request that a replica has: it takes its share of the steps while the new prompt is computed. Answers
that run wait for each chunk of the new prompt in turn, which counts, too: so a long prompt goes where few answers stop,
and a prompt is not computed again lightly. Steps and prompts count by their measured times (a step as much as a chunk
of 128 tokens while nothing is measured), so a slow replica gets less. One popular prefix therefore spreads over the
replicas as its load grows, and prompts without a common prefix are spread by load alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline.routing.policies.base import Arrival, ReplicaLoad

USES_LOAD = True
USES_PREFIX = True
USES_WARM_CHUNKS = True

_WAITING = 4
"""What a request that waits counts beside its prompt: others must end before it begins, which takes many steps."""
_DELAY = 0.125
"""What a second counts in which the answer of another request stops, against one before the new first token."""


def choose(arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
    """See `Policy`. Of equal ones, that takes the request which has the lowest load, and then has seen least: so the
    memory of all caches is used."""
    chunks = len(arrival.prefix)
    return min(
        (expected_work(chunks, one), one.num_requests, one.num_tokens, one.num_seen, one.number) for one in replicas
    )[-1]


def expected_work(chunks: int, replica: ReplicaLoad) -> float:
    """What is computed at a replica before the first token of a prompt of so many chunks, and what that delays, in a
    usual replica's chunks.

    The new request, too, counts as one that waits if there is no place for it. Of the delayed ones, no more count than
    fill half of the places: else long prompts would wait for each other where queues grow, while others have room.
    """
    waiting = max(0, replica.num_requests - replica.max_running + 1)
    ahead = replica.num_requests + (_WAITING - 1) * waiting
    own = chunks - replica.warm_chunks
    delay = _DELAY * max(0, own) * min(replica.num_requests, replica.max_running // 2)
    return replica.request_cost * ahead + replica.chunk_cost * (own + replica.pending_chunks + delay)
