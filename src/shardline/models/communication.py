"""What each parallel axis moves. These are the only formulas; docs/parallelism.md says them in words.

All functions count the bytes that ONE rank receives, and the messages (collectives or hand-offs) that it waits for one
after the other, for one step of `num_tokens` tokens of a replica. A decode step has a token for each sequence, and a
prefill step a chunk of prompts. Sums over layers cover `layers`, a stage's layers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardline.config.topology import Axis
from shardline.models.partition import Span
from shardline.models.spec import DecoderSpec, Layer

Exchange = Literal["exact", "fast", "vllm"]
"""How tensor-parallel ranks exchange: gathers of finished values, all-reduces in float32, or all-reduces in 16 bits."""

_FLOAT16, _FLOAT32 = 2, 4
_CONTEXT_EXCHANGES = 4
"""Of a layer: a gather of queries, keys and values, and one each of maxima, sums and outputs."""


@dataclass(frozen=True)
class Traffic:
    """What one rank receives in a step."""

    num_bytes: float
    num_messages: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_bytes + other.num_bytes, self.num_messages + other.num_messages)


NOTHING = Traffic(0.0, 0)


def tensor_traffic(spec: DecoderSpec, layers: Span, ranks: int, num_tokens: float, exchange: Exchange) -> Traffic:
    """Traffic of tensor parallelism over `ranks`. Experts count as split; for whole ones see `expert_traffic`."""
    if ranks == 1:
        return NOTHING
    total = NOTHING
    share = (ranks - 1) / ranks
    for layer, count in count_layers(spec, layers):
        if exchange == "exact":
            elements, messages = layer.gathered(spec.hidden_size)
            one = Traffic(elements * _FLOAT16 * share * num_tokens, messages)
        else:
            # An all-reduce is a reduce-scatter and a gather: every element crosses twice.
            size = _FLOAT32 if exchange == "fast" else _FLOAT16
            one = Traffic(2 * 2 * spec.hidden_size * size * share * num_tokens, 2)
        total += Traffic(one.num_bytes * count, one.num_messages * count)
    return total


def pipeline_traffic(spec: DecoderSpec, stages: int, num_tokens: float, tensor: int = 1) -> Traffic:
    """Hand-offs of hidden states over all stage boundaries; each rank of a stage sends its equal part."""
    if stages == 1:
        return NOTHING
    elements = num_tokens * spec.residual_streams * spec.hidden_size
    return Traffic((stages - 1) * elements * _FLOAT16 / tensor, stages - 1)


def expert_traffic(spec: DecoderSpec, layers: Span, ranks: int, num_tokens: float, exchange: Exchange) -> Traffic:
    """Traffic of whole experts over `ranks`; `num_tokens` are the tokens of all replicas that share them.

    A token travels once to each rank that has one of its experts. This engine ("exact") returns one product for each
    chosen expert and then gathers the owners' rows; others return one sum from each rank.
    """
    total = NOTHING
    if ranks == 1:
        return total
    for layer, count in count_layers(spec, layers):
        if (routing := layer.feed_forward.routing) is None:
            continue
        met = routing.ranks_met(ranks) * (ranks - 1) / ranks
        back = routing.experts_per_token * (ranks - 1) / ranks if exchange == "exact" else met
        owned = num_tokens / ranks
        elements = owned * spec.hidden_size * (met + back)
        messages = 2
        if exchange == "exact":
            elements += num_tokens * spec.hidden_size * (ranks - 1) / ranks
            messages = 4
        total += Traffic(count * elements * _FLOAT16, count * messages)
    return total


def context_traffic(spec: DecoderSpec, layers: Span, ranks: int, num_tokens: float) -> Traffic:
    """Partial results (m, l, o) in float32 of attention over `ranks` that share each request's KV cache."""
    if ranks == 1:
        return NOTHING
    total = NOTHING
    for layer, count in count_layers(spec, layers):
        if elements := layer.attention.partial_size:
            num_bytes = num_tokens * elements * _FLOAT32 * (ranks - 1) / ranks
            total += Traffic(count * num_bytes, count * _CONTEXT_EXCHANGES)
    return total


TRAFFIC: Mapping[Axis, Callable[[DecoderSpec, Span, int, int, Exchange], Traffic]] = {
    "tensor": lambda spec, layers, ranks, replicas, exchange: tensor_traffic(spec, layers, ranks, 1, exchange),
    # Other engines leave all tokens of a replica on all of its ranks, whose one all-reduce also adds up experts.
    "expert": lambda spec, layers, ranks, replicas, exchange: (
        expert_traffic(spec, layers, ranks, replicas, exchange) if exchange == "exact" or replicas > 1 else NOTHING
    ),
    "context": lambda spec, layers, ranks, replicas, exchange: context_traffic(spec, layers, ranks, 1),
}
"""For each axis of `config.topology.GROUPS`, its traffic for one token of each replica.

The arguments are the spec, a stage's layers, the ranks and the replicas that exchange, and how they do it.
"""


@functools.lru_cache(maxsize=256)
def count_layers(spec: DecoderSpec, layers: Span) -> tuple[tuple[Layer, int], ...]:
    """The different layers of a stage, and how often each occurs."""
    own = spec.layers[layers.start : layers.stop]
    counts = Counter(map(id, own))
    return tuple((layer, counts[key]) for key, layer in {id(layer): layer for layer in own}.items())
