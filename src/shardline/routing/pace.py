"""How fast replicas are, by what was measured of them: the seconds of a step, and of a chunk of a prompt."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

_KEEP = 0.99
"""What an observation counts after each further one."""
_LEAST = 8
"""Observations before any of them counts."""
_STRIDE = math.log(1.5)
"""Paces closer than half of this factor are equal: else noise would part replicas that are alike."""
_LEAST_REQUEST, _MOST_REQUEST = 0.25, 4.0
_MOST_STRIDES = 6


class Costs(NamedTuple):
    """What a replica has to do, in chunks that a usual replica computes in the same time."""

    request: float = 1.0
    """For a request in flight: a step."""
    chunk: float = 1.0
    """For a chunk of a prompt."""


class Pace:
    """Least squares for seconds = steps x (a step's seconds) + chunks x (a chunk's), where older ones count less."""

    def __init__(self) -> None:
        self._num = 0
        self._step_step = self._step_chunk = self._chunk_chunk = self._step_time = self._chunk_time = 0.0

    def add(self, steps: float, chunks: float, seconds: float) -> None:
        """So many steps, with so many chunks of prompts in them, have taken so long."""
        self._num += 1
        self._step_step = _KEEP * self._step_step + steps * steps
        self._step_chunk = _KEEP * self._step_chunk + steps * chunks
        self._chunk_chunk = _KEEP * self._chunk_chunk + chunks * chunks
        self._step_time = _KEEP * self._step_time + steps * seconds
        self._chunk_time = _KEEP * self._chunk_time + chunks * seconds

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Those of a step and of a chunk; None: not enough was measured, or it makes no sense."""
        determinant = self._step_step * self._chunk_chunk - self._step_chunk**2
        if self._num < _LEAST or determinant <= 1e-6 * self._step_step * self._chunk_chunk:
            return None
        step = (self._chunk_chunk * self._step_time - self._step_chunk * self._chunk_time) / determinant
        chunk = (self._step_step * self._chunk_time - self._step_chunk * self._step_time) / determinant
        return (step, chunk) if step > 0.0 and chunk > 0.0 else None


class Paces:
    """Those of all replicas. The medians are a usual replica's."""

    def __init__(self) -> None:
        self._own: dict[int, Pace] = {}
        self._costs: dict[int, Costs] = {}
        """What follows from all observations so far; empty: it has to be computed."""
        self._usual = Costs()

    def add(self, replica: int, steps: float, chunks: float, seconds: float) -> None:
        """See `Pace.add`."""
        self._own.setdefault(replica, Pace()).add(steps, chunks, seconds)
        self._costs.clear()

    def forget(self, replica: int) -> None:
        """Note that what runs under this number is another replica now."""
        self._own.pop(replica, None)
        self._costs.clear()

    def costs(self, replica: int) -> Costs:
        """Those of a usual replica, if nothing is known of this one. If nothing is known at all, 1."""
        if not self._costs and self._own:
            self._compare()
        return self._costs.get(replica, self._usual)

    def _compare(self) -> None:
        known = {number: seconds for number, pace in self._own.items() if (seconds := pace.seconds) is not None}
        self._costs = dict.fromkeys(self._own, Costs())
        self._usual = Costs()
        if not known:
            return
        step, chunk = (statistics.median(one) for one in zip(*known.values(), strict=True))
        request = min(max(step / chunk, _LEAST_REQUEST), _MOST_REQUEST)
        self._usual = Costs(request)
        self._costs = dict.fromkeys(self._own, self._usual) | {
            number: Costs(request * _stride(own_step / step), _stride(own_chunk / chunk))
            for number, (own_step, own_chunk) in known.items()
        }


def _stride(factor: float) -> float:
    """The nearest of the factors that are told apart."""
    power = round(math.log(factor) / _STRIDE)
    return math.exp(_STRIDE * min(max(power, -_MOST_STRIDES), _MOST_STRIDES))
