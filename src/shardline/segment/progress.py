"""Arrival counters that every rank keeps in shared memory, so that a missed deadline names the rank that missed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from shardline.config.topology import RankGrid

_FIELDS = 16
"""int64 per rank: one 128-byte line, so that ranks do not share cache lines."""
_FINISHED, _ARRIVALS, _WAITING = range(3)


class ProgressBoard:
    """One line of counters per rank over a shared buffer; each rank writes its own line only."""

    def __init__(self, buffer: memoryview, grid: RankGrid) -> None:
        count = grid.world_size * _FIELDS
        self._stages = [grid.place(rank).pp_rank for rank in range(grid.world_size)]
        self._lines: npt.NDArray[np.int64] = np.frombuffer(buffer, dtype=np.int64, count=count).reshape(-1, _FIELDS)

    @staticmethod
    def num_bytes(world_size: int) -> int:
        """Bytes of the buffer for `world_size` ranks."""
        return world_size * _FIELDS * 8

    def line(self, rank: int) -> ProgressLine:
        """The writing end of one rank."""
        return ProgressLine(self._lines[rank])

    def late_ranks(self, step_id: int) -> list[int]:
        """Ranks to blame for step `step_id` being late.

        Of the first stage that has not finished it, since later ones wait for that: the ranks that are not waiting
        for another one; where all wait, those that arrived at the fewest exchanges.
        """
        unfinished = [rank for rank, line in enumerate(self._lines) if line[_FINISHED] <= step_id]
        if not unfinished:
            return []
        stage = min(self._stages[rank] for rank in unfinished)
        suspects = [rank for rank in unfinished if self._stages[rank] == stage]
        busy = [rank for rank in suspects if not self._lines[rank][_WAITING]]
        if busy:
            return busy
        fewest = min(self._lines[rank][_ARRIVALS] for rank in suspects)
        return [rank for rank in suspects if self._lines[rank][_ARRIVALS] == fewest]


class ProgressLine:
    """The counters of one rank; only that rank writes them."""

    def __init__(self, fields: npt.NDArray[np.int64]) -> None:
        self._fields = fields

    def finish(self, step_id: int) -> None:
        """Note that the rank has finished a step. The counter is step_id + 1, since memory begins as zero."""
        self._fields[_FINISHED] = step_id + 1

    @property
    def exchanges(self) -> npt.NDArray[np.int64]:
        """The counters that `waiting` keeps, for exchanges that keep them themselves: arrivals, then waiting or not."""
        return self._fields[_ARRIVALS : _WAITING + 1]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around every exchange in which this rank waits for others."""
        self._fields[_ARRIVALS] += 1
        self._fields[_WAITING] = 1
        yield
        # Not in a finally: a rank whose exchange failed is still one that waited.
        self._fields[_WAITING] = 0
