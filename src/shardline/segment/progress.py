"""Arrival counters of every rank in shared memory. After a missed deadline they tell which rank is late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from shardline.config.topology import RankGrid

_FIELDS = 16
"""Number of int64 per rank: a line of 128 bytes, so that ranks do not share cache lines."""
_FINISHED, _ARRIVALS, _WAITING = range(3)


class ProgressBoard:
    """One line of counters per rank over a shared buffer. Each rank writes only its own line."""

    def __init__(self, buffer: memoryview, grid: RankGrid) -> None:
        count = grid.world_size * _FIELDS
        self._stages = [grid.place(rank).pp_rank for rank in range(grid.world_size)]
        self._lines: npt.NDArray[np.int64] = np.frombuffer(buffer, dtype=np.int64, count=count).reshape(-1, _FIELDS)

    @staticmethod
    def num_bytes(world_size: int) -> int:
        """Bytes of the buffer for `world_size` ranks."""
        return world_size * _FIELDS * 8

    def line(self, rank: int) -> ProgressLine:
        """The line of one rank, for writing."""
        return ProgressLine(self._lines[rank])

    def copy_line(self, rank: int, fields: Sequence[int]) -> None:
        """Take over the line of a rank on another host, as `read_line` of that host gave it."""
        self._lines[rank, : len(fields)] = fields

    def read_line(self, rank: int) -> tuple[int, ...]:
        """The counters of one rank."""
        return tuple(int(field) for field in self._lines[rank, : _WAITING + 1])

    def late_ranks(self, step_id: int) -> list[int]:
        """The ranks that cause the delay of step `step_id`.

        They belong to the first stage that has not finished the step, since later stages wait for it. They are the
        ranks of that stage that do not wait for another rank. If all of them wait, they are the ranks that have
        arrived at the fewest exchanges.
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
    """The counters of one rank. Only that rank writes them."""

    def __init__(self, fields: npt.NDArray[np.int64]) -> None:
        self._fields = fields

    def finish(self, step_id: int) -> None:
        """Record that the rank has finished a step. The counter is step_id + 1, since memory starts as zero."""
        self._fields[_FINISHED] = step_id + 1

    @property
    def exchanges(self) -> npt.NDArray[np.int64]:
        """The counters that `waiting` updates: arrivals, and 1 while waiting. Some exchanges update them directly."""
        return self._fields[_ARRIVALS : _WAITING + 1]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Use this around every exchange in which the rank waits for others."""
        self._fields[_ARRIVALS] += 1
        self._fields[_WAITING] = 1
        yield
        # Not in a finally: a rank whose exchange failed still counts as waiting.
        self._fields[_WAITING] = 0
