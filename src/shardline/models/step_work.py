"""What one rank reads, computes and exchanges in a step, as functions of the step's tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardline.config.topology import RankPlace
from shardline.models.communication import (
    NOTHING,
    Exchange,
    Traffic,
    count_layers,
    expert_traffic,
    pipeline_traffic,
    tensor_traffic,
)
from shardline.models.kv_shapes import kv_parts
from shardline.models.parameters import CountedParameter, counted_parameters
from shardline.models.partition import Span, split_heads
from shardline.models.sharding import Numerics
from shardline.models.sizes import experts_met, multiplications_per_pair, rank_total, state_bytes
from shardline.models.spec import (
    DTYPE_BYTES,
    GQA,
    Attention,
    DecoderSpec,
    KVDType,
    LinearAttention,
    MoE,
    Routing,
    SparseMLA,
)
from shardline.models.stored_weights import StoredWeights


@dataclass(frozen=True)
class AttentionWork:
    """Attention of equal layers on a rank, summed over these layers."""

    window: int | None
    """The most tokens that a token attends to; None: all before it."""
    bytes_per_token: float
    """Bytes of keys and values of one cached token."""
    flops_per_pair: float
    """Operations of one new token with one cached token."""

    def shared_by(self, ranks: int) -> AttentionWork:
        """The part of one of `ranks` that share each request's keys and values."""
        return AttentionWork(self.window, self.bytes_per_token / ranks, self.flops_per_pair / ranks)


@dataclass(frozen=True)
class StepWork:
    """The coefficients of a rank's work; see the methods for the sums."""

    dense_bytes: float
    """Weights that every step reads."""
    expert_bytes: float
    """Weights of all routed experts of the rank."""
    dense_flops: float
    """Operations of one token in the linears that it always uses, without the lm_head."""
    expert_flops: float
    """Operations of one token in its routed experts: the rank's mean share."""
    head_flops: float
    """Operations of one sampled token in the lm_head."""
    routing: Routing | None
    expert_ranks: int
    """Ranks over which whole experts are spread; 1: the rank has a part of each."""
    replicas: int
    """Replicas whose tokens meet the rank's experts."""
    attention: tuple[AttentionWork, ...]
    state_bytes: float
    """States of linear attention of one request: read and written in each step."""
    num_layers: int
    num_expert_layers: int
    exchanges: tuple[tuple[Traffic, int], ...]
    """(traffic for one token, ranks that take part) of each axis within a stage."""
    hand_off: Traffic
    """Traffic of one token at one stage boundary."""

    def weight_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a step with `num_tokens` tokens of each replica reads."""
        if self.routing is None:
            return self.dense_bytes
        met = experts_met(self.routing, num_tokens * self.replicas) / self.routing.num_experts
        return self.dense_bytes + self.expert_bytes * met

    def cache_bytes(self, num_seqs: float, context: float) -> float:
        """Bytes of keys, values and states that `num_seqs` sequences of `context` tokens read."""
        per_seq = sum(one.bytes_per_token * _seen(context, one.window) for one in self.attention)
        return num_seqs * (per_seq + 2 * self.state_bytes)

    def flops(self, num_tokens: float, num_sampled: float, pairs_context: float) -> float:
        """Operations of a step with `num_tokens` tokens that attend to `pairs_context` tokens on average."""
        linear = num_tokens * (self.dense_flops + self.expert_flops) + num_sampled * self.head_flops
        return linear + num_tokens * sum(
            one.flops_per_pair * _seen(pairs_context, one.window) for one in self.attention
        )


def step_work(
    spec: DecoderSpec,
    place: RankPlace,
    stages: Sequence[Span],
    stored: StoredWeights,
    kv_dtype: KVDType,
    exchange: Exchange,
    *,
    whole_experts: bool = False,
    whole: Collection[str] = (),
) -> StepWork:
    """The work of the rank at `place`. For `whole` see `sizes.stored_weight_bytes`."""
    stage, tensor = stages[place.pp_rank], len(place.tp_peers)
    numerics: Numerics = "exact" if exchange == "exact" else "fast"
    counted = list(counted_parameters(spec, stage, stored.layer_class))
    is_last = stage.stop == len(spec.layers)
    # The embedding is looked up, not read, unless it serves as the lm_head too.
    tied = [one for one in counted if one.name == "embed.weight" and is_last and spec.tied_embeddings]
    head = [one for one in counted if one.name == "lm_head.weight"] or tied
    always = [one for one in counted if not one.num_experts and one.name not in ("embed.weight", "lm_head.weight")]
    experts = [one for one in counted if one.num_experts]

    def total(parts: Sequence[CountedParameter], bytes_: bool) -> int:
        def elements(name: str, shape: tuple[int, ...]) -> int:
            return math.prod(shape) if len(shape) == 2 and not name.endswith("conv.weight") else 0

        count = stored.num_bytes if bytes_ else elements
        return rank_total(spec, place, stages, parts, count, numerics, whole_experts, whole)

    routing, expert_layers = None, 0
    traffic = [(tensor_traffic(spec, stage, tensor, 1, exchange), tensor)]
    for layer, number in count_layers(spec, stage):
        if isinstance(layer.feed_forward, MoE):
            routing = layer.feed_forward.routing
            expert_layers += number
    ranks = len(place.ep_peers) if whole_experts and routing is not None else 1
    # Other engines leave all tokens of a replica on all of its ranks, whose one all-reduce also adds up experts.
    if ranks > 1 and (exchange == "exact" or ranks > tensor):
        traffic.append((expert_traffic(spec, stage, ranks, ranks // tensor, exchange), ranks))
    # A token's chosen experts are spread evenly over the ranks that hold experts.
    chosen = 0.0 if routing is None else routing.experts_per_token / routing.num_experts
    return StepWork(
        dense_bytes=total(always, True) + total(head, True),
        expert_bytes=total(experts, True),
        dense_flops=2 * total(always, False),
        expert_flops=2 * total(experts, False) * chosen * (ranks // tensor if ranks > 1 else 1),
        head_flops=2 * total(head, False),
        routing=routing,
        expert_ranks=ranks,
        replicas=ranks // tensor if ranks > 1 else 1,
        attention=attention_work(spec, stage, tensor, kv_dtype),
        state_bytes=state_bytes(spec, place, stages),
        num_layers=stage.size,
        num_expert_layers=expert_layers,
        exchanges=tuple((one, group) for one, group in traffic if one != NOTHING),
        hand_off=pipeline_traffic(spec, min(2, len(stages)), 1, tensor),
    )


def cached_token_bytes(attention: Attention, tensor: int, dtype: KVDType) -> int:
    """Bytes of one token in one layer on the fullest of `tensor` ranks, without scales per token."""
    heads = 1
    if isinstance(attention, GQA):
        shares = split_heads(attention.num_heads, attention.num_kv_heads, tensor)
        heads = max(share.kv_heads.size for share in shares)
    plain: KVDType = "bfloat16"
    return sum(
        part.num_bytes if part.dtype != plain else part.num_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[plain]
        for part in kv_parts(attention, heads, 1, 1, plain)
    )


def attention_work(spec: DecoderSpec, stage: Span, tensor: int, dtype: KVDType) -> tuple[AttentionWork, ...]:
    """Attention on one of `tensor` ranks with a KV cache of type `dtype`, for each kind of layer of a stage."""
    found = []
    for layer, number in count_layers(spec, stage):
        attention = layer.attention
        if isinstance(attention, LinearAttention):
            continue
        window = attention.indexer.top_k if isinstance(attention, SparseMLA) else attention.window
        pair = 2 * multiplications_per_pair(attention) / tensor
        found.append(AttentionWork(window, number * cached_token_bytes(attention, tensor, dtype), number * pair))
    return tuple(found)


def _seen(context: float, window: int | None) -> float:
    return context if window is None else min(context, window)
