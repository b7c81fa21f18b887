"""Which of several replicas takes a prompt: the router, and what it is told of the replicas."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.api.quarantine import RunningChoice
from shardline.messages.engine import EngineOutputs
from shardline.messages.stats import EngineStats
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import CHUNK_TOKENS, Router

_PACE_STEPS = 16
"""Over fewer steps, their times say little."""


class Chooser:
    """Chooses by the router policy."""

    def __init__(self, policy: str, *, caches: bool) -> None:
        """`caches`: see `Router`."""
        self._router = Router(policy, caches=caches)
        self._paced: dict[int, EngineStats] = {}
        """The counters of each replica when its pace was last looked at."""

    def choose(self, choice: RunningChoice, loads: Sequence[ReplicaLoad], stats: Sequence[EngineStats]) -> int:
        """The replica for a choice and those of the same prompt. `loads`: of those that may take it; `stats`: the
        counters of all."""
        for load in loads:
            self._note_pace(load.number, stats[load.number])
        request = choice.request
        decision = self._router.decide(request.prompt_token_ids, request.cache_salt, loads, model=request.variant)
        choice.pending_chunks = decision.cost
        return decision.number

    def note_outputs(self, index: int, event: EngineOutputs) -> None:
        """Note what a replica says of its cache."""
        if event.kv_events:
            self._router.kv.apply(index, 0, event.kv_events)

    def forget_prefixes(self, index: int) -> None:
        """Note that nothing is left in the prefix cache of a replica."""
        self._router.forget_replica(index)

    def lose_replica(self, index: int) -> None:
        """Note that a replica is lost."""
        self._router.forget_replica(index)
        self._router.kv.forget(index)

    def _note_pace(self, index: int, now: EngineStats) -> None:
        """Tell the router how long the steps since the last look took, unless they are few."""
        before = self._paced.get(index, EngineStats())
        steps = now.num_steps - before.num_steps
        if 0 <= steps < _PACE_STEPS:
            return
        self._paced[index] = now
        if steps < 0:
            return  # another engine counts
        prompts, hits = now.prompt_tokens - before.prompt_tokens, now.prefix_hits - before.prefix_hits
        chunks = max(0, prompts - hits) / CHUNK_TOKENS
        self._router.paces.add(index, steps, chunks, now.step_seconds - before.step_seconds)
