"""How many tokens each expert got. Every rank counts in memory that the engine maps too. No torch is needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class ExpertLoadBoard:
    """Counters [num_layers, num_experts] of each rank over a shared buffer. Each rank writes only its own counters.

    One rank counts a token, once for each expert that the token chose. So the sum over ranks counts every token.
    Layers without experts stay at zero.
    """

    def __init__(self, buffer: memoryview, num_ranks: int, num_layers: int, num_experts: int) -> None:
        count = num_ranks * num_layers * num_experts
        flat: Counts = np.frombuffer(buffer, dtype=np.int64, count=count) if count else np.empty(0, dtype=np.int64)
        self._counts = flat.reshape(num_ranks, num_layers, num_experts)

    @staticmethod
    def num_bytes(num_ranks: int, num_layers: int, num_experts: int) -> int:
        """Bytes of the buffer."""
        return num_ranks * num_layers * num_experts * 8

    def of_rank(self, rank: int) -> Counts:
        """The counters of one rank, for writing."""
        counters: Counts = self._counts[rank]
        return counters

    def copy_counters(self, rank: int, counters: bytes) -> None:
        """Take over the counters of a rank on another host; empty: nothing is known of them."""
        if counters:
            self._counts[rank] = np.frombuffer(counters, dtype=np.int64).reshape(self._counts[rank].shape)

    def total(self) -> Counts:
        """[num_layers, num_experts]: the sum over ranks."""
        total: Counts = self._counts.sum(axis=0)
        return total
