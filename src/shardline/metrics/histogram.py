"""A histogram that is cheap to observe, for what happens at every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily, Metric


class FastHistogram:
    """A Prometheus histogram with one label. Only one thread may observe."""

    def __init__(self, name: str, text: str, label: tuple[str, str], bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of the buckets, in order; the last bucket has none."""
        self.bounds = list(bounds)
        self._name = name
        self._text = text
        self._label = label
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def counts(self) -> list[int]:
        """How many values each bucket has had so far."""
        return list(self._counts)

    def describe(self) -> Iterable[Metric]:
        """The family without samples."""
        return [HistogramMetricFamily(self._name, self._text, labels=[self._label[0]])]

    def collect(self) -> Iterable[Metric]:
        """The family."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label[0]])
        buckets, total = [], 0
        for bound, count in zip([*self.bounds, float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        family.add_metric([self._label[1]], buckets, self._sum)
        return [family]
