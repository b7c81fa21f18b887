"""Counters of every rank in shared memory: after a missed deadline they tell which rank is late, and otherwise how the
ranks spend their time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from shardline.messages.stats import RankTimes

_FIELDS = 16
"""Number of int64 per rank: a line of 128 bytes, so that ranks do not share cache lines."""
_FINISHED, _ARRIVALS, _WAITING, _STEPS, _BUSY_NS, _WAITING_NS = range(6)

_SAMPLE_SECONDS = 0.05
"""Mean time between two looks at whether a rank waits."""
_IDLE_SECONDS = 0.25
"""The same while it runs no step."""


class RankProgress(msgspec.Struct, frozen=True):
    """What a rank's counters say at one moment. It can be sent from another host."""

    rank: int
    finished: int
    """The last step that the rank has finished, plus one."""
    arrivals: int
    """Exchanges that the rank has entered."""
    waiting: bool
    """Whether it waits in an exchange for other ranks."""
    times: RankTimes


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
        return [ProgressLine(line).read(rank) for rank, line in zip(self._ranks, self._lines, strict=True)]


class ProgressLine:
    """The counters of one rank. Only that rank writes them."""

    def __init__(self, fields: npt.NDArray[np.int64]) -> None:
        self._fields = fields
        self._clock = (0, 0.0, 0.0)
        """Steps in flight, since when the oldest one runs, and the seconds of all steps before. It is replaced as a
        whole, since another thread may read it."""
        self._attributed = 0.0
        """Seconds of steps that are counted as busy or as waiting."""
        self._is_sampled = False

    def read(self, rank: int) -> RankProgress:
        """What the counters say now; `rank` is whose they are."""
        fields = [int(value) for value in self._fields[: _WAITING_NS + 1]]
        times = RankTimes(rank, fields[_STEPS], fields[_BUSY_NS] / 1e9, fields[_WAITING_NS] / 1e9)
        return RankProgress(rank, fields[_FINISHED], fields[_ARRIVALS], bool(fields[_WAITING]), times)

    def begin(self) -> None:
        """A step begins, or waits on the device for the one before."""
        in_flight, since, ran = self._clock
        self._clock = in_flight + 1, since if in_flight else time.perf_counter(), ran

    def finish(self, step_id: int) -> None:
        """Record that the rank has finished a step. The counter is step_id + 1, since memory starts as zero."""
        self._fields[_FINISHED] = step_id + 1
        in_flight, since, ran = self._clock
        if in_flight:
            now = time.perf_counter()
            self._clock = in_flight - 1, now, ran + now - since
            self._fields[_STEPS] += 1
            if not self._is_sampled:
                self._attribute(ran + now - since)

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

    def sample_waiting(self) -> NoReturn:
        """Find out how much of the steps the rank waits for others, in a thread of its own.

        Recorded steps run their exchanges without Python, so looks at random times take the place of a clock.
        """
        self._is_sampled = True
        draw = random.Random()
        while True:
            time.sleep(draw.uniform(0.5, 1.5) * (_SAMPLE_SECONDS if self.sample() else _IDLE_SECONDS))

    def sample(self) -> bool:
        """Attribute the time of steps since the last look to what the rank does now. False: it runs no step."""
        in_flight, since, ran = self._clock
        if in_flight:
            self._attribute(ran + time.perf_counter() - since)
        return in_flight > 0

    def _attribute(self, total: float) -> None:
        """`total`: seconds of all steps so far."""
        spent, self._attributed = total - self._attributed, total
        self._fields[_WAITING_NS if self._fields[_WAITING] else _BUSY_NS] += max(0, int(1e9 * spent))
