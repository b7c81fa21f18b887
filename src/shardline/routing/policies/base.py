"""What a policy knows, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """A request that needs a replica."""

    number: int
    """How many requests were routed before it."""
    prefix: tuple[int, ...] = ()
    """Chained hashes of the prompt's full chunks; equal hashes mean equal prompts up to there."""


class ReplicaLoad(NamedTuple):
    """A replica that can take requests.

    Tuples compare by load: fewest requests first, among equals fewest tokens. `min` of thousands of them is fast.
    """

    num_requests: int
    """Requests that it has been given and has not finished."""
    num_tokens: int
    """Tokens of these requests: prompts and longest outputs."""
    number: int
    """Its number among all replicas."""
    max_running: int
    """Requests that it runs at once; further ones wait."""
    warm_chunks: int = 0
    """Leading chunks of the arriving prompt that it has, by what it has seen lately or says itself."""
    pending_chunks: int = 0
    """Chunks of prompts that it has been given, probably has not cached, and has not begun to answer."""
    num_seen: int = 0
    """Chunks of all prompts that it has seen lately."""
    request_cost: float = 1.0
    """What one of its requests costs it, by its measured steps, in chunks of a usual replica."""
    chunk_cost: float = 1.0
    """What a chunk of a prompt costs it."""


class Policy(Protocol):
    """The module of a policy. Its functions are pure."""

    USES_LOAD: bool
    """Whether the answer depends on the requests that replicas have."""
    USES_PREFIX: bool
    """Whether the answer depends on the prompt."""
    USES_WARM_CHUNKS: bool
    """Whether the answer depends on what replicas have seen lately."""

    def choose(self, arrival: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        """The index of the replica that runs the request. There is at least one, and they are in order of index."""
