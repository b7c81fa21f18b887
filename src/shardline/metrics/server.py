"""The metrics of one server: request latencies as clients see them, HTTP answers, and the engines' counters.

Each server has a registry of its own, so that two servers in one process do not share metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.exposition import choose_encoder

from shardline.metrics.engine import EngineCollector
from shardline.metrics.requests import RequestMetrics, RequestTimer
from shardline.stats import EngineStats


class ServerMetrics:
    """Everything that /metrics shows: engine counters, request latencies, HTTP answers and the process."""

    def __init__(self, model_name: str, read_stats: Callable[[], Sequence[EngineStats]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, read_stats))
        ProcessCollector(registry=self.registry)
        self.requests = RequestMetrics(self.registry, model_name)
        self._responses = Counter(
            "shardline:http_requests",
            "HTTP requests answered.",
            ["handler", "method", "status"],
            registry=self.registry,
        )

    def start_timer(self, choices: int) -> RequestTimer:
        """Start measuring a request with this number of choices."""
        return RequestTimer(self.requests, choices)

    def count_response(self, handler: str, method: str, status: int) -> None:
        """Count one HTTP answer. `handler` is the route, not the path: the number of paths has no limit."""
        self._responses.labels(handler, method, str(status)).inc()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The body and the content type for a scrape with this Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
