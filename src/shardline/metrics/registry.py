"""One server's metrics, in a registry of its own: two servers in one process do not meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.exposition import choose_encoder

from shardline.metrics.engine import EngineCollector
from shardline.metrics.requests import RequestMetrics, RequestTimer
from shardline.types import EngineStats


class ServerMetrics:
    """All that /metrics shows: the engines' counters, the requests' latencies, the HTTP answers and the process."""

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

    def timer(self, choices: int) -> RequestTimer:
        """Start measuring a request of `choices` choices."""
        return RequestTimer(self.requests, choices)

    def count_response(self, handler: str, method: str, status: int) -> None:
        """Count one HTTP answer. `handler` is the route, never the raw path: that would be unbounded."""
        self._responses.labels(handler, method, str(status)).inc()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The body and content type of a scrape whose Accept header is `accept`."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
