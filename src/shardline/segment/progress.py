"""Arrival counters of every rank in shared memory. After a missed deadline they tell which rank is late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt

from shardline.config.topology import RankGrid

_FIELDS = 16
"""Number of int64 per rank: a line of 128 bytes, so that ranks do not share cache lines."""
_FINISHED, _ARRIVALS, _WAITING = range(3)


class RankProgress(msgspec.Struct, frozen=True):
    """What a rank's counters say at one moment. It can be sent from another host."""

    rank: int
    finished: int
    """The last step that the rank has finished, plus one."""
    arrivals: int
    """Exchanges that the rank has entered."""
    waiting: bool
    """Whether it waits in an exchange for other ranks."""


class ProgressBoard:
    """The counters of the ranks of one host over a shared buffer. Each rank writes only its own line."""

    def __init__(self, buffer: memoryview, ranks: Sequence[int]) -> None:
        """`ranks`: those that count in this buffer."""
        count = len(ranks) * _FIELDS
        self._ranks = list(ranks)
        self._lines: npt.NDArray[np.int64] = np.frombuffer(buffer, dtype=np.int64, count=count).reshape(-1, _FIELDS)

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Bytes of the buffer for `num_ranks` ranks."""
        return num_ranks * _FIELDS * 8

    def line(self, rank: int) -> ProgressLine:
        """The line of one rank, for writing."""
        return ProgressLine(self._lines[self._ranks.index(rank)])

    def read(self) -> list[RankProgress]:
        """The progress of the ranks of this host."""
        return [
            RankProgress(rank, int(line[_FINISHED]), int(line[_ARRIVALS]), bool(line[_WAITING]))
            for rank, line in zip(self._ranks, self._lines, strict=True)
        ]


def late_ranks(grid: RankGrid, progress: Sequence[RankProgress], step_id: int) -> list[int]:
    """The ranks that cause the delay of step `step_id`, given the progress of all ranks of the engine.

    They belong to the first stage that has not finished the step, since later stages wait for it. They are the ranks
    of that stage that do not wait for another rank. If all of them wait, they are the ranks that have arrived at the
    fewest exchanges.
    """
    unfinished = [line for line in progress if line.finished <= step_id]
    if not unfinished:
        return []
    stage = min(grid.place(line.rank).pp_rank for line in unfinished)
    suspects = [line for line in unfinished if grid.place(line.rank).pp_rank == stage]
    busy = [line.rank for line in suspects if not line.waiting]
    if busy:
        return busy
    fewest = min(line.arrivals for line in suspects)
    return [line.rank for line in suspects if line.arrivals == fewest]


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
