"""A policy with its memory: how many requests came, and which replica has seen which prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardline.routing.kv_index import KVIndex
from shardline.routing.pace import Paces
from shardline.routing.policies import find_policy
from shardline.routing.policies.base import Arrival, ReplicaLoad
from shardline.routing.policies.least_work import expected_work

CHUNK_TOKENS = 128
"""Tokens of a prompt that are hashed together. A prefix that differs within a chunk is no common prefix."""
CHUNK_BYTES = 256
"""The same of a prompt of which only the text is known."""
_MOST_CHUNKS = 64
"""Leading chunks of a prompt that are looked at: further ones hardly change the choice, and cost time."""


class Decision(NamedTuple):
    """Why a request goes where it goes."""

    number: int
    """The replica that takes it."""
    chunks: int
    """Full chunks of its prompt that are looked at."""
    replicas: Sequence[ReplicaLoad]
    """Those from which was chosen."""

    @property
    def chosen(self) -> ReplicaLoad:
        """The replica that takes it."""
        return next(one for one in self.replicas if one.number == self.number)

    @property
    def cost(self) -> int:
        """Chunks that the replica has to compute for it, as far as is known."""
        return max(0, self.chunks - self.chosen.warm_chunks)

    def explain(self, name: Callable[[int], str]) -> str:
        """For each replica the expected work, in chunks that a usual one computes in that time, and the chunks of the
        prompt that are expected there."""
        return " ".join(
            f"{name(one.number)}={expected_work(self.chunks, one):.4g} (hit {one.warm_chunks}/{self.chunks})"
            for one in self.replicas
        )


class Router:
    """Chooses a replica for each request by one of the policies."""

    def __init__(
        self, policy: str, most_seen: int = 1 << 16, kv_bytes: int = 256 << 20, *, caches: bool = True
    ) -> None:
        """`most_seen` is the number of chunks that are remembered for each replica, the latest ones. `kv_bytes`: see
        `KVIndex`. `caches`: whether replicas have prefix caches; else no prompt is expected to be anywhere.

        Raises:
            ValueError: there is no such policy.
        """
        self._policy = find_policy(policy)
        self._most_seen = most_seen if caches else 0
        self._num_routed = 0
        self._seen: dict[int, OrderedDict[int, None]] = {}
        self._holders: dict[int, tuple[int, ...]] = {}
        """For each chunk the replicas that have seen it."""
        self.paces = Paces()
        """How fast replicas are. Whoever measures it writes here."""
        self.kv = KVIndex(kv_bytes)
        """What replicas say that they have. It goes before what they have seen, and whoever hears of it writes here."""

    @property
    def uses_load(self) -> bool:
        """Whether choices depend on the load of replicas."""
        return self._policy.USES_LOAD

    @property
    def uses_prefix(self) -> bool:
        """Whether choices depend on the prompt."""
        return self._policy.USES_PREFIX

    def choose(self, prompt: Sequence[int], salt: str, replicas: Sequence[ReplicaLoad]) -> int:
        """The number of the replica that `decide` chooses."""
        return self.decide(prompt, salt, replicas).number

    def decide(
        self,
        prompt: Sequence[int],
        salt: str,
        replicas: Sequence[ReplicaLoad],
        *,
        session: str = "",
        model: str = "",
        adapter: str = "",
    ) -> Decision:
        """Choose the replica that runs a request with this prompt: its token ids, or bytes that stand for them.

        `session`: a name of requests that likely share more than their beginnings say. Where one of them was counts as
        one chunk that is warm. Prompts for different models share nothing. `adapter`: the model's name if it is one.
        `warm_chunks`, `num_seen` and costs of `replicas` are filled in.
        """
        prefix = hash_chunks(prompt, f"{model}\0{salt}" if model else salt) if self._policy.USES_PREFIX else ()
        warm: dict[int, int] = {}
        if prefix and not isinstance(prompt, bytes):
            held = self.kv.cached_tokens(prompt, salt, adapter, len(prefix) * CHUNK_TOKENS)
            warm = {number: tokens // CHUNK_TOKENS for number, tokens in held.items()}
        if not all(one.number in warm for one in replicas):
            warm = self._warm_chunks(prefix) | warm
        # Short prompts count, too, where replicas have equal work: else all that come alone go to the first replica.
        marks = prefix or (hash((model, salt, *prompt)),)
        if session and self._policy.USES_WARM_CHUNKS:
            mark = hash((model, salt, "session", session))
            marks = (mark, *marks)
            for number in self._holders.get(mark, ()):
                warm[number] = warm.get(number, 0) + 1
        if self._policy.USES_WARM_CHUNKS:
            replicas = [
                ReplicaLoad(
                    *one[:4],
                    warm.get(one.number, 0),
                    one.pending_chunks,
                    len(self._seen.get(one.number, ())),
                    *self.paces.costs(one.number),
                )
                for one in replicas
            ]
        number = self._policy.choose(Arrival(self._num_routed, prefix), replicas)
        self._num_routed += 1
        if self._policy.USES_WARM_CHUNKS and self._most_seen:
            self._remember(number, marks)
        return Decision(number, len(prefix), replicas)

    def forget_replica(self, index: int) -> None:
        """Note that a replica has lost its cache; it may be another one from now on."""
        self.paces.forget(index)
        for chunk in self._seen.pop(index, ()):
            self._drop_holder(chunk, index)

    def correct(self, decision: Decision, share: float) -> None:
        """A replica has found this share of a prompt in its cache.

        If that is less than half of what it has seen of it, its cache is smaller than was thought: the older half of
        what it has seen is forgotten. Prompts that it was computing meanwhile may have come too late to be found.
        """
        chosen, seen = decision.chosen, self._seen.get(decision.number)
        if seen and not chosen.pending_chunks and 2 * share * decision.chunks < chosen.warm_chunks:
            for _ in range(len(seen) // 2):
                self._drop_holder(seen.popitem(last=False)[0], decision.number)

    def _warm_chunks(self, prefix: tuple[int, ...]) -> dict[int, int]:
        """How many leading chunks each replica has seen, of replicas that have seen the first one."""
        there = self._holders.get(prefix[0], ()) if prefix else ()
        warm: dict[int, int] = {}
        for count, chunk in enumerate(prefix):
            holders = self._holders.get(chunk, ())
            if holders != there:  # mostly they are equal, and nothing has to be done
                warm.update(dict.fromkeys(there, count))
                there = tuple(index for index in there if index in holders)
            if not there:
                break
        return warm | dict.fromkeys(there, len(prefix))

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
