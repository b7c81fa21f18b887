"""When requests are to be sent, in seconds after the start of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ramp:
    """A request rate that grows over the run."""

    strategy: str
    """"linear" or "exponential"."""
    start: float
    """Requests per second at the first request."""
    end: float
    """Requests per second at the last one."""

    def rates(self, count: int) -> np.ndarray:
        """The rate at each of `count` requests, [count]."""
        progress = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return np.asarray(self.start + (self.end - self.start) * progress)
        return np.asarray(self.start * (self.end / self.start) ** progress)


def arrival_times(
    count: int, rate: float, rng: np.random.Generator, *, burstiness: float = 1.0, ramp: Ramp | None = None
) -> list[float]:
    """The send times of `count` requests.

    Args:
        rate: requests per second; inf: all at once. A ramp replaces it.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, less is burstier, inf is even.

    With a constant rate, the times are scaled so that the last request is sent after `count / rate` seconds: runs with
    other seeds then offer the same load.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    rates = ramp.rates(count) if ramp is not None else np.full(count, rate)
    # A linear ramp may begin at 0, where the gap has no end: the first request is sent at once.
    gaps = np.divide(1.0, rates, out=np.zeros(count), where=rates > 0)
    if not math.isinf(burstiness):
        gaps = rng.gamma(burstiness, gaps / burstiness)
    times = np.cumsum(gaps)
    if ramp is None and times[-1] > 0:
        times *= (count / rate) / times[-1]
    return [float(time) for time in times]
