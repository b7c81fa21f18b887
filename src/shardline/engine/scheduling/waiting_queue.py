"""The sequences that wait, in the order in which they start."""

from __future__ import annotations

import heapq

from shardline.engine.scheduling.sequence import LiveSequence


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
