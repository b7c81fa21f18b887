"""How many tokens each expert got. Every rank counts in shared memory, so that others can read. No torch is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class ExpertLoadBoard:
    """Counters [num_layers, num_experts] of the ranks of one host. Each rank writes only its own counters.

    One rank counts a token, once for each expert that the token chose. So the sum over ranks counts every token.
    Layers without experts stay at zero.
    """

    def __init__(self, buffer: memoryview, ranks: Sequence[int], num_layers: int, num_experts: int) -> None:
        """`ranks`: those that count in this buffer."""
        count = len(ranks) * num_layers * num_experts
        flat: Counts = np.frombuffer(buffer, dtype=np.int64, count=count) if count else np.empty(0, dtype=np.int64)
        self._counts = flat.reshape(len(ranks), num_layers, num_experts)
        self._ranks = list(ranks)

    @staticmethod
    def num_bytes(num_ranks: int, num_layers: int, num_experts: int) -> int:
        """Bytes of the buffer."""
        return num_ranks * num_layers * num_experts * 8

    def of_rank(self, rank: int) -> Counts:
        """The counters of one rank, for writing."""
        counters: Counts = self._counts[self._ranks.index(rank)]
        return counters

    def from_bytes(self, counters: bytes) -> Counts:
        """The counters of a rank on another host, which were sent as `of_rank(...).tobytes()`."""
        return np.frombuffer(counters, dtype=np.int64).reshape(self._counts.shape[1:])

    def total(self) -> Counts:
        """[num_layers, num_experts]: the sum over the ranks of this host."""
        total: Counts = self._counts.sum(axis=0)
        return total
