"""The sequences of a scheduler by their state: those that wait, those that run, and those that leave."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Sequence

from shardline.engine.kv_cache import KVCache
from shardline.engine.scheduling.sequence import LiveSequence, State


class WaitingQueue:
    """A priority queue by `LiveSequence.order` from which any sequence can be removed.

    A preempted sequence keeps its order, so it comes before all that arrived later in its priority class.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], LiveSequence]] = []
        self._members: set[LiveSequence] = set()
        self.num_tokens = 0
        """Prompt tokens and earlier output of all waiting sequences, cached tokens included."""

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: LiveSequence) -> None:
        """Add a sequence that is not in the queue."""
        assert sequence not in self._members
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._members.add(sequence)
        self.num_tokens += len(sequence.tokens)

    def peek(self) -> LiveSequence | None:
        """The first sequence in order; None if the queue is empty."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence in self._members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: LiveSequence) -> None:
        """Remove a sequence, whatever its position."""
        self._members.remove(sequence)
        self.num_tokens -= len(sequence.tokens)
        if self._heap[0][1] is sequence:
            heapq.heappop(self._heap)


class SequenceQueues:
    """Moves sequences between states. Only this class writes `LiveSequence.state`."""

    def __init__(self, kv: KVCache) -> None:
        self.waiting = WaitingQueue()
        self.running: list[LiveSequence] = []
        """In order."""
        self.draining: set[LiveSequence] = set()
        """Sequences that left the running ones but have plans in flight, and therefore blocks."""
        self.fetching: dict[LiveSequence, int] = {}
        """For each sequence that waits for blocks of its prefix, the ticket with which they come."""
        self.ends: list[int] = []
        """The `seq_id`s that were given up since the last `take_ends`."""
        self._kv = kv

    def add(self, sequence: LiveSequence) -> None:
        """Let a sequence wait that has no blocks."""
        if sequence.awaits_mask or sequence.awaits_adapter:
            sequence.state = State.PARKED
        else:
            sequence.state = State.WAITING
            self.waiting.push(sequence)

    def give_mask(self, sequence: LiveSequence, allowed: bytes, foreseen: Sequence[int] = ()) -> None:
        """Note the masks of a sequence's next token and of those after guesses, see `LiveSequence.allowed`."""
        sequence.allowed, sequence.foreseen, sequence.awaits_mask = allowed, list(foreseen), False
        if sequence.state is State.PARKED:
            self.add(sequence)

    def give_adapter(self, sequence: LiveSequence, slot: int) -> None:
        """Note that the ranks have the adapter of a sequence in a slot, until the sequence ends."""
        sequence.adapter_slot = slot
        if sequence.state is State.PARKED:
            self.add(sequence)

    def fetch(self, sequence: LiveSequence, ticket: int) -> None:
        """Let a waiting sequence wait for blocks."""
        self.waiting.remove(sequence)
        sequence.state = State.FETCHING
        self.fetching[sequence] = ticket

    def end_fetches(self, tickets: Collection[int]) -> None:
        """Let the sequences wait as usual whose blocks have come."""
        for sequence in [sequence for sequence, ticket in self.fetching.items() if ticket in tickets]:
            del self.fetching[sequence]
            self.add(sequence)

    def start(self, sequence: LiveSequence) -> None:
        """Run a waiting sequence."""
        self.waiting.remove(sequence)
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=lambda other: other.order)

    def leave(self, sequence: LiveSequence, state: State) -> None:
        """End or preempt a sequence; its blocks return now, or once its plans in flight are collected."""
        before, sequence.state = sequence.state, state
        if before is State.WAITING:
            self.waiting.remove(sequence)
        elif before is State.FETCHING:
            del self.fetching[sequence]
        elif before is State.RUNNING:
            self.running.remove(sequence)
            self.draining.add(sequence)
            self.release(sequence)

    def release(self, sequence: LiveSequence) -> None:
        """Take back the blocks of a sequence that has left and has no plan in flight. A preempted one then waits."""
        if sequence.num_in_flight > 0 or sequence not in self.draining:
            return
        self.draining.remove(sequence)
        self._kv.free_blocks(sequence)
        self.ends.append(sequence.seq_id)
        if sequence.state is State.PREEMPTED:
            sequence.forget_computed()
            self.add(sequence)

    def take_ends(self) -> list[int]:
        """The `seq_id`s that workers can forget, each once."""
        ends, self.ends = self.ends, []
        return ends
