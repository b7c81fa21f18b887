"""The metrics of one server: request latencies as clients see them, HTTP answers, and the engines' counters.

Each server has a registry of its own, so that two servers in one process do not share metrics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from shardline.deployment.deployment import KernelFallback
from shardline.messages.stats import EngineStats
from shardline.metrics.engine import EngineCollector
from shardline.metrics.histogram import FastHistogram
from shardline.metrics.names import OWN, SHARED_NAMES, VLLM

_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_PARAMS_N = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)


class ServerMetrics:
    """Everything that /metrics shows: engine counters, request latencies, HTTP answers and the process."""

    def __init__(
        self,
        model_name: str,
        read_stats: Callable[[], Sequence[EngineStats]],
        prefix: str = "shardline",
        read_cache_config: Callable[[], Mapping[str, str]] = dict,
        read_refused: Callable[[], int] = int,
        read_fallbacks: Callable[[], Sequence[Sequence[KernelFallback]]] = tuple,
    ) -> None:
        """`prefix`: see PrefixedRegistry; `read_cache_config` gives the labels of the metric cache_config_info,
        `read_refused` the number of requests for which the queue had no room, `read_fallbacks` each engine's."""
        self.registry = CollectorRegistry()
        self._shown = PrefixedRegistry(self.registry, prefix)
        self.registry.register(EngineCollector(model_name, read_stats, read_cache_config, read_refused, read_fallbacks))
        ProcessCollector(registry=self.registry)
        self.requests = RequestHistograms(self.registry, model_name)
        self.answers = Counter(
            "shardline:http_requests",
            "HTTP requests answered.",
            ["handler", "method", "status"],
            registry=self.registry,
        )

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The body and the content type for a scrape with this Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._shown), content_type


class RequestHistograms:
    """Histograms and counters of requests, labelled `model_name`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"shardline:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model_name)

        self.first_token = FastHistogram(
            "shardline:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            ("model_name", model_name),
            _FIRST_TOKEN_SECONDS,
        )
        registry.register(self.first_token)
        self.inter_token = FastHistogram(
            "shardline:inter_token_latency_seconds",
            "Seconds between two outputs of a request.",
            ("model_name", model_name),
            _TOKEN_SECONDS,
        )
        registry.register(self.inter_token)
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _REQUEST_SECONDS
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a request, all its choices together.", _TOKENS
        )
        self.choices = histogram("request_params_n", "Choices asked for in a request.", _PARAMS_N)
        self.queue = histogram(
            "request_queue_time_seconds", "Seconds that a choice waited for its first step.", _REQUEST_SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Seconds from a choice's first step to its first token.", _REQUEST_SECONDS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Seconds from a choice's first token to its last one.", _REQUEST_SECONDS
        )
        self.inference = histogram(
            "request_inference_time_seconds", "Seconds from a choice's first step to its last token.", _REQUEST_SECONDS
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean seconds between a choice's tokens.", _TOKEN_SECONDS
        )
        self.preemptions = histogram("request_num_preemptions", "Preemptions of a choice.", _PREEMPTIONS)
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a choice that were not cached.", _TOKENS
        )
        self.longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest choice of a request.", _TOKENS
        )
        self.max_tokens = histogram(
            "request_params_max_tokens", "Largest number of tokens that a request asked for.", _TOKENS
        )
        ended = Counter(
            "shardline:request_success",
            "Choices that ended, by reason; abort: the client disconnected or the server stopped.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.ended = partial(ended.labels, model_name)
        """The counter of choices that ended for a reason."""


class PrefixedRegistry(CollectorRegistry):
    """The metrics of another registry; `prefix` is "shardline", "vllm" or "both"."""

    def __init__(self, source: CollectorRegistry, prefix: str) -> None:
        super().__init__()
        self._source = source
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        """The families of the source, those with a shared name renamed, or there twice."""
        for family in self._source.collect():
            name = family.name.removeprefix(OWN)
            shared = family.name.startswith(OWN) and name in SHARED_NAMES
            if not shared or self._prefix != "vllm":
                yield family
            if shared and self._prefix != "shardline":
                yield _renamed(family, VLLM + name)


def _renamed(family: Metric, name: str) -> Metric:
    other = copy.copy(family)
    other.name = name
    other.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return other
