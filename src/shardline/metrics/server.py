"""The metrics of one server: request latencies as clients see them, HTTP answers, and the engines' counters.

Each server has a registry of its own, so that two servers in one process do not share metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from shardline.messages.stats import EngineStats
from shardline.metrics.engine import EngineCollector
from shardline.metrics.prefix import PrefixedRegistry
from shardline.metrics.requests import RequestMetrics, ResponseMetrics


class ServerMetrics:
    """Everything that /metrics shows: engine counters, request latencies, HTTP answers and the process."""

    def __init__(
        self,
        model_name: str,
        read_stats: Callable[[], Sequence[EngineStats]],
        prefix: str = "shardline",
        read_cache_config: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`prefix`: see PrefixedRegistry; `read_cache_config` gives the labels of the metric cache_config_info."""
        self.registry = CollectorRegistry()
        self._shown = PrefixedRegistry(self.registry, prefix)
        self.registry.register(EngineCollector(model_name, read_stats, read_cache_config))
        ProcessCollector(registry=self.registry)
        self.requests = RequestMetrics(self.registry, model_name)
        self.responses = ResponseMetrics(self.registry)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The body and the content type for a scrape with this Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._shown), content_type
