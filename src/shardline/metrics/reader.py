"""The engines' metrics as values, in the shape in which vLLM's `LLM.get_metrics` returns them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family

from shardline.metrics.names import OWN, SHARED_NAMES, VLLM


@dataclass
class Metric:
    """What all metrics have."""

    name: str
    """With vLLM's prefix where it means what vLLM's metric of that name means."""
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass
class Histogram(Metric):
    """How many values were at most as large as each bound."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def read_metrics(families: Iterable[Family]) -> list[Metric]:
    """The samples of families of counters and gauges."""
    metrics: list[Metric] = []
    for family in families:
        own = family.name.removeprefix(OWN)
        name = f"{VLLM if own in SHARED_NAMES else OWN}{own}"
        if own == _PER_POSITION:
            metrics += _vectors(name, family)
            continue
        if family.type == "histogram":
            metrics += _histograms(name, family)
            continue
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.type == "counter":
                metrics.append(Counter(name, labels, sample.value))
            else:
                metrics.append(Gauge(name, labels, sample.value))
    return metrics


def _histograms(name: str, family: Family) -> list[Histogram]:
    """A histogram for each engine."""
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        histogram = found.setdefault(tuple(labels.items()), Histogram(name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        else:
            histogram.sum = sample.value
    return list(found.values())


def _vectors(name: str, family: Family) -> list[Vector]:
    """The counters of each engine as one vector; they come in the order of their positions."""
    by_engine: dict[str, Vector] = {}
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "position"}
        vector = by_engine.setdefault(labels["engine"], Vector(name, labels, []))
        vector.values.append(int(sample.value))
    return list(by_engine.values())
