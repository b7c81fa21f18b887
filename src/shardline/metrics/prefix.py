"""The metrics under vLLM's names, for dashboards that were made for it (--metrics-prefix)."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

OWN = "shardline:"
VLLM = "vllm:"

SHARED_NAMES = frozenset(
    {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
        "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_cached", "cache_config_info",
        "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
        "request_params_max_tokens", "request_num_preemptions", "request_prefill_kv_computed_tokens",
    }
)  # fmt: skip
"""Metrics that mean what vLLM's of the same name mean. All others keep their own prefix."""


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
