"""A policy with its memory: how many requests came, and which replica has seen which prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shardline.routing.policies import find_policy
from shardline.routing.policies.base import Arrival, ReplicaLoad

CHUNK_TOKENS = 128
"""Tokens of a prompt that are hashed together. A prefix that differs within a chunk is no common prefix."""
CHUNK_BYTES = 256
"""The same of a prompt of which only the text is known."""
_MOST_CHUNKS = 64
"""Leading chunks of a prompt that are looked at: further ones hardly change the choice, and cost time."""


class Router:
    """Chooses a replica for each request by one of the policies."""

    def __init__(self, policy: str, most_seen: int = 1 << 16) -> None:
        """`most_seen` is the number of chunks that are remembered for each replica, the latest ones.

        Raises:
            ValueError: there is no such policy.
        """
        self._policy = find_policy(policy)
        self._most_seen = most_seen
        self._num_routed = 0
        self._seen: dict[int, OrderedDict[int, None]] = {}
        self._holders: dict[int, tuple[int, ...]] = {}
        """For each chunk the replicas that have seen it."""

    @property
    def uses_load(self) -> bool:
        """Whether choices depend on the load of replicas."""
        return self._policy.USES_LOAD

    @property
    def uses_prefix(self) -> bool:
        """Whether choices depend on the prompt."""
        return self._policy.USES_PREFIX

    def choose(self, prompt: Sequence[int], salt: str, replicas: Sequence[ReplicaLoad]) -> int:
        """The index of the replica that runs a request with this prompt: its token ids, or bytes that stand for them.

        `warm_chunks` of `replicas` is filled in.
        """
        prefix = hash_chunks(prompt, salt) if self._policy.USES_PREFIX else ()
        warm = self._warm_chunks(prefix)
        if warm:
            replicas = [
                replica._replace(warm_chunks=warm[replica.number]) if replica.number in warm else replica
                for replica in replicas
            ]
        index = self._policy.choose(Arrival(self._num_routed, prefix), replicas)
        self._num_routed += 1
        if self._policy.USES_WARM_CHUNKS:
            self._remember(index, prefix)
        return index

    def forget_replica(self, index: int) -> None:
        """Note that a replica has lost its cache."""
        for chunk in self._seen.pop(index, ()):
            self._drop_holder(chunk, index)

    def _warm_chunks(self, prefix: tuple[int, ...]) -> dict[int, int]:
        """How many leading chunks each replica has seen, of replicas that have seen the first one."""
        warm: dict[int, int] = {}
        for count, chunk in enumerate(prefix, 1):
            holders = [index for index in self._holders.get(chunk, ()) if warm.get(index, 0) == count - 1]
            if not holders:
                break
            warm.update(dict.fromkeys(holders, count))
        return warm

    def _drop_holder(self, chunk: int, index: int) -> None:
        holders = tuple(holder for holder in self._holders.pop(chunk) if holder != index)
        if holders:
            self._holders[chunk] = holders

    def _remember(self, index: int, prefix: tuple[int, ...]) -> None:
        seen = self._seen.setdefault(index, OrderedDict())
        # The last chunk first: a chunk is of no use without those before it, so these must be forgotten later.
        for chunk in reversed(prefix):
            if chunk not in seen:
                self._holders[chunk] = (*self._holders.get(chunk, ()), index)
                seen[chunk] = None
            seen.move_to_end(chunk)
        while len(seen) > self._most_seen:
            self._drop_holder(seen.popitem(last=False)[0], index)


def hash_chunks(prompt: Sequence[int], salt: str) -> tuple[int, ...]:
    """Chained hashes of the first full chunks of a prompt: token ids or bytes."""
    size = CHUNK_BYTES if isinstance(prompt, bytes) else CHUNK_TOKENS
    hashes, parent = [], hash(salt)
    stop = min(len(prompt), _MOST_CHUNKS * size)
    for start in range(0, stop - size + 1, size):
        chunk = prompt[start : start + size]
        parent = hash((parent, chunk) if isinstance(chunk, bytes) else (parent, *chunk))
        hashes.append(parent)
    return tuple(hashes)
