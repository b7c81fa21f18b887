"""Which sequence is preempted when the KV cache is full, and the warning that follows."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from shardline.engine.kv_cache import KVCache
from shardline.engine.scheduling.queues import SequenceQueues
from shardline.engine.scheduling.sequence import LiveSequence, State

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_WARNINGS = 10.0


def cheapest_victim(
    running: Sequence[LiveSequence], needy: LiveSequence, cost: Callable[[LiveSequence], int]
) -> LiveSequence | None:
    """The running sequence to preempt so that `needy` gets blocks, perhaps `needy` itself; None if there is none.

    Candidates are of the least important priority class, and at most as important as `needy`. The cheapest of them has
    the fewest tokens to compute again (`cost`); among equals it is the latest arrival. `running` is in order, and its
    first sequence is never preempted, so there is always one that makes progress. A preempted sequence starts again
    only when there is room for all of its tokens (see Scheduler), so two sequences cannot preempt each other for ever.
    """
    priority = needy.order[0]
    candidates = [sequence for sequence in running[1:] if sequence.order[0] >= priority]
    return max(candidates, key=lambda s: (s.order[0], -cost(s), s.order), default=None)


class PreemptionLog:
    """Counts preemptions, and warns of them at most once in ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, warns: bool = True) -> None:
        """Without `warns`, it only counts."""
        self.count = 0
        self._warns = warns
        self._clock = clock
        self._next_warning = float("-inf")
        self._unsaid = 0
        self._unsaid_tokens = 0

    def record(self, sequence: LiveSequence, cost: int) -> None:
        """Note that `sequence` was preempted and that up to `cost` tokens must be computed again."""
        self.count += 1
        if not self._warns:
            return
        self._unsaid += 1
        self._unsaid_tokens += cost
        now = self._clock()
        if now < self._next_warning:
            return
        self._next_warning = now + _SECONDS_BETWEEN_WARNINGS
        _log.warning(
            "Request %s was preempted because there is not enough KV cache space: %d preemption(s) since the last "
            "such line, up to %d tokens to compute again; %d preemption(s) since the start. To avoid this, give the "
            "KV cache more memory (--kv-cache-memory or --gpu-memory-utilization), run fewer sequences at once "
            "(--max-num-seqs), or split the model over more ranks (--tensor-parallel-size, --pipeline-parallel-size).",
            sequence.request.request_id,
            self._unsaid,
            self._unsaid_tokens,
            self.count,
        )
        self._unsaid = self._unsaid_tokens = 0


def make_room(needy: LiveSequence, queues: SequenceQueues, kv: KVCache, log: PreemptionLog, now: float) -> bool:
    """Preempt until each KV group of `needy` can get one more block; False: that is impossible before further results.
    `now`: see `TimelineRecorder`."""
    while kv.reach(needy) <= needy.num_scheduled:
        if queues.draining or kv.is_fetching:
            return False
        victim = cheapest_victim(queues.running, needy, partial(_recompute_cost, kv))
        if victim is None:
            return False
        cost = _recompute_cost(kv, victim)
        log.record(victim, cost)
        victim.recorder.note_preemption(cost, now)
        queues.leave(victim, State.PREEMPTED)
        if victim is needy:
            return False
    return True


def _recompute_cost(kv: KVCache, sequence: LiveSequence) -> int:
    """Tokens to compute again if the sequence loses its blocks: all but those in blocks that others hold too.

    This takes O(log(number of blocks)), since shared blocks always form a prefix.
    """
    table, first = sequence.kv.tables[0], sequence.kv.num_slid[0]
    shared = bisect_left(table, True, lo=first, key=lambda block: kv.pool.num_references(block) == 1)
    return sequence.num_scheduled - (shared * kv.block_size if shared > first else 0)
