"""The router's metrics, for Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from shardline.router.fleet import Fleet

_OUTCOMES = ("ok", "refused", "busy", "failed", "cut", "left")
_CHUNKS = ("all", "expected", "found")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)


class RouterMetrics:
    """Counters of what became of requests, and gauges of the backends."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._urls: set[str] = set()
        """Of the backends that were there at the last scrape."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_FleetCollector(fleet))
        self.outcomes = Counter(
            "shardline_router:requests",
            "Requests that a backend was given, by outcome: ok, refused (4xx), busy (429 or 503), failed, cut, left.",
            ["backend", "outcome"],
            registry=self.registry,
        )
        self.retries = Counter(
            "shardline_router:retries", "Requests that were given to a further backend.", registry=self.registry
        )
        self.resumes = Counter(
            "shardline_router:resumes",
            "Streams that broke off and were given to another backend.",
            registry=self.registry,
        )
        self.unrouted = Counter(
            "shardline_router:unrouted", "Requests that no backend could take.", registry=self.registry
        )
        self.waiting = Gauge(
            "shardline_router:requests_waiting",
            "Requests that wait here while all backends are full.",
            registry=self.registry,
        )
        self.chunks = Counter(
            "shardline_router:prompt_chunks",
            "Chunks of prompts whose answers say what was cached: all, those expected in the cache, those found there.",
            ["backend", "kind"],
            registry=self.registry,
        )
        self.added = Histogram(
            "shardline_router:added_seconds",
            "Seconds from a request's last byte until it was sent to its first backend.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The body and the content type for a scrape with this Accept header."""
        urls = {backend.url for backend in self._fleet.backends}
        for gone in self._urls - urls:  # pods come and go, each with an address of its own
            for counter, kinds in ((self.outcomes, _OUTCOMES), (self.chunks, _CHUNKS)):
                for kind in kinds:
                    with contextlib.suppress(KeyError):
                        counter.remove(gone, kind)
        self._urls = urls
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _FleetCollector:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """The state of each backend now."""
        now = time.monotonic()
        ready = GaugeMetricFamily("shardline_router:backend_ready", "1: it takes requests.", labels=["backend"])
        running = GaugeMetricFamily("shardline_router:backend_requests", "Requests in flight.", labels=["backend"])
        breaker = GaugeMetricFamily(
            "shardline_router:breaker_open", "1: it has failed, and is left alone.", labels=["backend"]
        )
        for backend in self._fleet.backends:
            ready.add_metric([backend.url], float(backend.state(now) == "ready"))
            running.add_metric([backend.url], backend.num_requests)
            breaker.add_metric([backend.url], float(backend.breaker.state(now) != "closed"))
        return ready, running, breaker
