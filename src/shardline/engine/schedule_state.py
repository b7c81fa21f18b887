"""What a scheduler and its parts share: the sequences, their blocks, and the plans in flight."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shardline.deployment.deployment import CachePlan, StepLimits
from shardline.engine.kv_cache import KVCache
from shardline.engine.preemption import PreemptionLog
from shardline.engine.queues import SequenceQueues
from shardline.engine.registry import RequestRegistry
from shardline.engine.sequence import LiveSequence
from shardline.engine.speculative.drafter import Drafter
from shardline.messages.step import StepPlan


class PlanInFlight(NamedTuple):
    """A plan that is not updated yet."""

    plan: StepPlan
    sequences: list[LiveSequence]
    """Those of the plan's steps, in the same order."""
    planned: float
    """When it was scheduled."""


class ScheduleState:
    """The state of one scheduler.

    `queues` says which sequences run, `kv` which blocks they hold, and `registry` which requests they belong to.
    """

    def __init__(
        self,
        limits: StepLimits,
        cache: CachePlan,
        num_blocks: int,
        max_model_len: int,
        *,
        preemptions: PreemptionLog | None = None,
    ) -> None:
        """`num_blocks` includes the null block. `preemptions` counts preemptions; None: it also warns of them."""
        self.budget = limits.max_num_batched_tokens
        """The most tokens of a plan."""
        # The budget has a token for every running sequence, so a decode never waits for another one.
        self.max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self.max_samples = limits.max_samples
        """The most tokens that a plan may sample."""
        self.drafter = None if not limits.drafts else Drafter(limits.speculation)
        """None: no drafts are made."""
        self.groups = cache.groups
        self.block_size = cache.block_size
        self.kv = KVCache(cache.groups, num_blocks, cache.block_size, prefix_caching=cache.prefix_caching)
        self.registry = RequestRegistry(self.kv, cache.groups, block_size=cache.block_size, max_model_len=max_model_len)
        self.queues = SequenceQueues(self.kv)
        self.in_flight: deque[PlanInFlight] = deque()
        self.num_starts = 0
        self.num_steps = 0
        """Plans so far, the empty ones included."""
        self.preemptions = preemptions or PreemptionLog()

    def launch(self, plan: StepPlan, sequences: list[LiveSequence], now: float) -> None:
        """Note that a plan is in flight from now on."""
        self.num_steps += 1
        self.in_flight.append(PlanInFlight(plan, sequences, now))
