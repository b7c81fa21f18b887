"""How published offline benchmarks were run: how many requests, and what the tool lets run at once."""

from __future__ import annotations

import math

from shardline.models.parameters import counted_parameters
from shardline.models.partition import Span
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GIB
from shardline.planner.layout import Layout
from shardline.planner.planned_model import PlannedModel

_PROMPTS = ((2048, 3000), (16384, 1500), (math.inf, 1000))
"""(longest prompt or output, requests) of TensorRT-LLM's table of throughput."""
_STORED_ELEMENTS = {"nvfp4": 1 / 2 + 1 / 16}
"""Elements in a checkpoint for each parameter: pairs in a byte count once, and so do scales."""
_ELEMENT_BYTES = {"nvfp4": 0.5, "fp8": 1.0, "bf16": 2.0}
"""Formats for which trtllm-bench chooses limits, with the bytes that it assumes for an element."""
_OTHER_LIMITS = (2048, 8192)
_MEMORY_SHARE = 0.95
_MOST_REQUESTS = 4096
_MOST_TOKENS = 32768


def num_prompts(input_len: float, output_len: float) -> int:
    """Requests of an offline benchmark with prompts and outputs of these lengths."""
    longest = max(input_len, output_len)
    return next(count for length, count in _PROMPTS if longest <= length)


def bench_limits(
    model: PlannedModel, layout: Layout, cluster: Cluster, input_len: float, output_len: float
) -> tuple[int, int]:
    """(most requests of a replica and stage, most tokens in a step) that trtllm-bench chooses.

    Its estimate of the cache is coarse: it takes latent attention for one with keys and values of each head. It does
    not cut prompts, so a step has room for a whole one.
    """
    requests, tokens = _OTHER_LIMITS
    if layout.weights in _ELEMENT_BYTES:
        length = input_len + output_len
        estimated = _cache_bytes(model, layout, cluster) / (_token_bytes(model, layout) * length)
        most = min(estimated, _MOST_REQUESTS) / layout.pipeline
        requests = _rounded_requests(most)
        tokens = _rounded_tokens(min(most * (1 + input_len / output_len), _MOST_TOKENS))
    return requests, max(tokens, int(input_len) + requests)


def _cache_bytes(model: PlannedModel, layout: Layout, cluster: Cluster) -> float:
    """Memory of all GPUs that the tool estimates for the cache."""
    spec = model.spec
    counted = counted_parameters(spec, Span(0, len(spec.layers)), lambda layer: 0)
    parameters = sum(math.prod(one.shape) * one.num_layers * max(1, one.num_experts) for one in counted)
    stored = parameters * _STORED_ELEMENTS.get(layout.weights, 1.0) * _ELEMENT_BYTES[layout.weights]
    return max(0.0, layout.num_gpus * cluster.smallest.usable_gib * GIB - stored) * _MEMORY_SHARE


def _token_bytes(model: PlannedModel, layout: Layout) -> float:
    """Bytes of one token in the cache, as the tool estimates them: every rank has at least one head."""
    spec = model.spec
    first = next(layer.attention for layer in spec.layers if layer.attention.key_dim)
    heads, size = first.num_kv_heads, first.key_dim
    if first.latent_sizes:
        heads, size = first.num_heads, spec.hidden_size // first.num_heads
    element = 1 if layout.kv == "fp8" else 2
    return 2.0 * len(spec.layers) * max(layout.tensor * layout.data, heads) * size * element


def _rounded_requests(most: float) -> int:
    if most < 256:
        return max(64, 32 * math.ceil(most / 32))
    unit = 128 if most < 1024 else 256
    return unit * math.ceil(most / unit)


def _rounded_tokens(most: float) -> int:
    if most < 4096:
        return max(2048, 256 * math.ceil(most / 256))
    unit = 512 if most < 8192 else 1024
    return unit * math.ceil(most / unit)
