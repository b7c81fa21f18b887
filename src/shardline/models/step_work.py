"""What one rank reads, computes and exchanges in a step, as functions of the step's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardline.config.topology import RankPlace
from shardline.models.communication import (
    NOTHING,
    Exchange,
    Traffic,
    count_layers,
    expert_traffic,
    output_size,
    pipeline_traffic,
    tensor_traffic,
)
from shardline.models.compressed import CompressedMQA, cache_rows, token_bytes
from shardline.models.kv_shapes import indexer_keys, indexer_of, kv_parts
from shardline.models.parameters import CountedParameter, counted_parameters, is_looked_up, parse_name
from shardline.models.partition import Span, split_heads
from shardline.models.sharding import Numerics
from shardline.models.sizes import experts_met, multiplications_per_pair, rank_total, state_bytes
from shardline.models.spec import (
    DTYPE_BYTES,
    GQA,
    MLA,
    Attention,
    DecoderSpec,
    Dense,
    Indexer,
    KVDType,
    LinearAttention,
    MoE,
    Routing,
    SparseMLA,
)
from shardline.models.stored_weights import StoredWeights

_FOUR_BIT_FLOATS = ("nvfp4", "mxfp4")
_STREAM_LAUNCHES = 4
"""Kernels that mix residual streams for a layer's two blocks, and write to them."""
_PLAIN_FORMATS = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class AttentionWork:
    """Attention of equal layers on a rank, summed over these layers."""

    window: int | None
    """The most tokens that a token attends to; None: all before it."""
    bytes_per_token: float
    """Bytes of keys and values of one cached token."""
    decode_flops: float
    """Operations of a decoded token with one cached token."""
    prefill_flops: float
    """Operations of a prompt's token with one token before it."""

    def shared_by(self, ranks: int) -> AttentionWork:
        """The part of one of `ranks` that share each request's keys and values."""
        return AttentionWork(
            self.window, self.bytes_per_token / ranks, self.decode_flops / ranks, self.prefill_flops / ranks
        )


@dataclass(frozen=True)
class StepWork:
    """The coefficients of a rank's work; see the methods for the sums."""

    dense_bytes: float
    """Weights that every step reads."""
    expert_bytes: float
    """Weights of all routed experts of the rank."""
    token_flops: Mapping[str, float]
    """Operations of one token in linears, without the lm_head, by the format in which their weights are stored.

    Of routed experts, it is the rank's mean share.
    """
    expert_flops: Mapping[str, float]
    """The part of `token_flops` in routed experts."""
    head_flops: float
    """Operations of one sampled token in the lm_head."""
    plain: str
    """The format of attention, of the lm_head and of other weights that are not quantized: "bf16" or "fp32"."""
    routing: Routing | None
    expert_ranks: int
    """Ranks over which whole experts are spread; 1: the rank has a part of each."""
    replicas: int
    """Replicas whose tokens meet the rank's experts."""
    attention: tuple[AttentionWork, ...]
    state_bytes: float
    """States of linear attention of one request: read and written in each step."""
    num_launches: int
    """Kernels of a step's layers, one after the other."""
    activation_bytes: float
    """Bytes of a token's activations that kernels read and write."""
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

    def product_seconds(
        self, num_tokens: float, num_sampled: float, rate: Callable[[str], float], computes: Callable[[str], bool]
    ) -> tuple[float, float]:
        """(time to compute the linears of a step, time for those of experts whose weights are expanded).

        `rate(format)` is the rate in operations per second, and `computes(format)` says whether the GPU has the format.
        If it has not, each product expands the weights. That is free in dense products, but not in grouped ones.
        """
        direct, expanded = num_sampled * self.head_flops / rate(self.plain), 0.0
        for label, flops in self.token_flops.items():
            grouped = 0.0 if computes(label) else self.expert_flops.get(label, 0.0)
            direct += num_tokens * (flops - grouped) / rate(label)
            expanded += num_tokens * grouped / rate(label)
        return direct, expanded

    def decode_attention_flops(self, num_seqs: float, context: float) -> float:
        """Operations of attention in which `num_seqs` sequences of `context` tokens decode one token each."""
        return num_seqs * sum(one.decode_flops * _seen(context, one.window) for one in self.attention)

    def prefill_attention_flops(self, num_tokens: float, context: float) -> float:
        """Operations of attention of `num_tokens` tokens of prompts to `context` tokens on average."""
        return num_tokens * sum(one.prefill_flops * _seen(context, one.window) for one in self.attention)


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
    stage, tensor = stages[place.pp_rank], len(place.peers("tensor"))
    numerics: Numerics = "exact" if exchange == "exact" else "fast"
    counted = list(counted_parameters(spec, stage, stored.layer_class))
    is_last = stage.stop == len(spec.layers)
    # The embedding is looked up, not read, unless it serves as the lm_head too.
    tied = [one for one in counted if one.name == "embed.weight" and is_last and spec.tied_embeddings]
    head = [one for one in counted if one.name == "lm_head.weight"] or tied
    always = [one for one in counted if not one.num_experts and not is_looked_up(one.name)]
    always = [one for one in always if one.name != "lm_head.weight"]
    experts = [one for one in counted if one.num_experts]

    plain = _PLAIN_FORMATS[stored.dtype]

    def total(parts: Sequence[CountedParameter], bytes_: bool) -> int:
        def elements(name: str, shape: tuple[int, ...]) -> int:
            return math.prod(shape) if len(shape) == 2 and not name.endswith("conv.weight") else 0

        count = stored.num_bytes if bytes_ else elements
        return rank_total(spec, place, stages, parts, count, numerics, whole_experts, whole)

    routings = [
        layer.feed_forward.routing for layer, _ in count_layers(spec, stage) if isinstance(layer.feed_forward, MoE)
    ]
    routing = routings[-1] if routings else None
    ranks = len(place.peers("expert")) if whole_experts and routing is not None else 1
    # A token's chosen experts are spread evenly over the ranks that hold experts.
    chosen = 0.0 if routing is None else routing.experts_per_token / routing.num_experts
    replicas = ranks // tensor if ranks > 1 else 1

    def flops(parts: Sequence[CountedParameter]) -> dict[str, float]:
        """Operations of one token, by the format of the weights."""
        found: dict[str, float] = {}
        for one in parts:
            packing = stored.packing(one.name)
            label = plain if packing is None else packing.label
            share = chosen * replicas if one.num_experts else 1.0
            found[label] = found.get(label, 0.0) + 2 * total([one], False) * share
        return found

    grouped, others = flops(experts), flops(always)
    return StepWork(
        dense_bytes=total(always, True) + total(head, True),
        expert_bytes=total(experts, True),
        token_flops={label: others.get(label, 0.0) + grouped.get(label, 0.0) for label in {**others, **grouped}},
        expert_flops=grouped,
        head_flops=2 * total(head, False),
        plain=plain,
        routing=routing,
        expert_ranks=ranks,
        replicas=replicas,
        attention=attention_work(spec, stage, tensor, kv_dtype, expands=exchange == "vllm"),
        state_bytes=state_bytes(spec, place, stages),
        num_launches=num_launches(spec, stage) + _format_launches(counted, stored),
        activation_bytes=activation_bytes(spec, stage, tensor),
        exchanges=_exchanges(spec, stage, tensor, ranks, exchange),
        hand_off=pipeline_traffic(spec, min(2, len(stages)), 1, tensor),
    )


def _exchanges(
    spec: DecoderSpec, stage: Span, tensor: int, ranks: int, exchange: Exchange
) -> tuple[tuple[Traffic, int], ...]:
    """(traffic for one token, ranks that take part) of tensor parallelism, and of experts over `ranks`."""
    traffic = [(tensor_traffic(spec, stage, tensor, 1, exchange), tensor)]
    # Other engines leave all tokens of a replica on all of its ranks, whose one all-reduce also adds up experts.
    if ranks > 1 and (exchange == "exact" or ranks > tensor):
        traffic.append((expert_traffic(spec, stage, ranks, ranks // tensor, exchange), ranks))
    return tuple((one, group) for one, group in traffic if one != NOTHING)


def num_launches(spec: DecoderSpec, stage: Span) -> int:
    """Kernels of a stage's layers in a usual implementation. Those that run beside others do not count."""
    return sum(
        number
        * (
            _attention_launches(layer.attention)
            + _feed_forward_launches(layer.feed_forward)
            + _STREAM_LAUNCHES * (layer.residual_streams > 1)
        )
        for layer, number in count_layers(spec, stage)
    )


def _attention_launches(attention: Attention) -> int:
    if isinstance(attention, LinearAttention):
        return 8  # norm, two projections, convolution, gates, delta rule, gated norm, output
    if isinstance(attention, MLA):
        # norm, down, norms, up, absorption, rotation, attention, merge, values, output; the indexer has six more
        return 10 + 6 * isinstance(attention, SparseMLA)
    if isinstance(attention, CompressedMQA):
        # norm, down, norms, up, rotation, attention, inverse rotation, two outputs; compressors have two
        return 9 + 2 * (attention.ratio > 0) + 8 * (attention.indexer is not None)
    # norm, projection, rotation, attention, output
    return 5 + (attention.qk_norm is not None) + 6 * (indexer_of(attention) is not None)


def _feed_forward_launches(feed_forward: Dense | MoE) -> int:
    if isinstance(feed_forward, MoE):
        return 9 + 2 * (feed_forward.latent_size is not None)
    return 4 if feed_forward.intermediate_size else 0


def _format_launches(counted: Sequence[CountedParameter], stored: StoredWeights) -> int:
    """Kernels that formats of weights add to those of `num_launches`, or save.

    Weights in blocks need activations that are quantized in blocks: two kernels in each half of a layer. Experts in
    4-bit floats have kernels that compute the activation in the first product, and the weighted sum in the second.
    """
    halves: dict[tuple[int | None, str], int] = {}
    fused: dict[int | None, int] = {}
    for one in counted:
        packing = stored.packing(one.name)
        if packing is None:
            continue
        name = parse_name(one.name)
        if packing.block_rows > 1:
            halves[name.layer, name.part.partition(".")[0]] = one.num_layers
        if one.num_experts and packing.label in _FOUR_BIT_FLOATS:
            fused[name.layer] = one.num_layers
    return 2 * sum(halves.values()) - 2 * sum(fused.values())


def activation_bytes(spec: DecoderSpec, stage: Span, tensor: int) -> float:
    """Bytes of a token's activations that the kernels of a stage read and write on one of `tensor` ranks."""
    total = 0.0
    for layer, number in count_layers(spec, stage):
        attention, feed_forward = layer.attention, layer.feed_forward
        hidden, inner = 8 * spec.hidden_size, 6 * output_size(attention) / tensor
        if (streams := layer.residual_streams) > 1:
            hidden += 2 * 3 * streams * spec.hidden_size  # each block reads them twice and writes them
        if isinstance(feed_forward, MoE):
            chosen = feed_forward.routing.experts_per_token
            hidden += 2 * chosen * spec.hidden_size
            inner += 6 * chosen * feed_forward.expert.intermediate_size / tensor
        else:
            inner += 6 * feed_forward.intermediate_size / tensor
        total += number * (hidden + inner)
    return total * DTYPE_BYTES[spec.dtype]


def cached_token_bytes(attention: Attention, tensor: int, dtype: KVDType) -> float:
    """Bytes of one token in one layer on the fullest of `tensor` ranks, without scales per token.

    Of compressed attention it is a token's part of the entries; all ranks have them.
    """
    if isinstance(attention, CompressedMQA):
        return token_bytes(attention, dtype)
    heads = 1
    if isinstance(attention, GQA):
        shares = split_heads(attention.num_heads, attention.num_kv_heads, tensor)
        heads = max(share.kv_heads.size for share in shares)
    plain: KVDType = "bfloat16"
    return sum(
        part.num_bytes if part.dtype != plain else part.num_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[plain]
        for part in kv_parts(attention, heads, 1, 1, plain)
    )


def attention_work(
    spec: DecoderSpec, stage: Span, tensor: int, dtype: KVDType, *, expands: bool = False
) -> tuple[AttentionWork, ...]:
    """Attention on one of `tensor` ranks with a KV cache of type `dtype`, for each kind of layer of a stage.

    With `expands`, prompts compute latent attention with the keys and values of each head, not in the dims of the
    latent.
    """
    found: list[AttentionWork] = []
    for layer, number in count_layers(spec, stage):
        attention = layer.attention
        if isinstance(attention, LinearAttention):
            continue
        if isinstance(attention, CompressedMQA):
            found.extend(_compressed_work(attention, number, tensor, dtype))
            continue
        indexer = indexer_of(attention)
        window = attention.window if indexer is None else indexer.top_k
        pair = 2 * multiplications_per_pair(attention) / tensor
        prefill = pair
        if expands and isinstance(attention, MLA) and not isinstance(attention, SparseMLA):
            prefill = 2 * attention.num_heads * (attention.query_head_dim + attention.value_head_dim) / tensor
        num_bytes = cached_token_bytes(attention, tensor, dtype)
        if indexer is not None:
            keys = sum(part.num_bytes for part in indexer_keys(indexer, 1, 1))
            num_bytes -= keys
            found.append(_indexer_work(indexer, number, keys))
        found.append(AttentionWork(window, number * num_bytes, number * pair, number * prefill))
    return tuple(found)


def _indexer_work(indexer: Indexer, number: int, key_bytes: float, ratio: int = 1) -> AttentionWork:
    """An indexer reads all of its keys: one of `key_bytes` for each `ratio` tokens. Every rank has all of its heads."""
    flops = number * 2 * indexer.num_heads * indexer.head_dim / ratio
    return AttentionWork(None, number * key_bytes / ratio, flops, flops)


def _compressed_work(attention: CompressedMQA, number: int, tensor: int, dtype: KVDType) -> Iterator[AttentionWork]:
    """Attention to the window and to entries, and what the indexer reads."""
    pair = 2 * multiplications_per_pair(attention) / tensor
    window, entries, keys = cache_rows(attention, dtype)
    indexer = attention.indexer
    yield AttentionWork(window.window, number * window.num_bytes, number * pair, number * pair)
    if entries is not None:
        chosen = None if indexer is None else indexer.top_k * entries.ratio
        flops = number * pair / entries.ratio
        yield AttentionWork(chosen, number * entries.num_bytes / entries.ratio, flops, flops)
    if keys is not None and indexer is not None:
        yield _indexer_work(indexer, number, keys.num_bytes, keys.ratio)


def _seen(context: float, window: int | None) -> float:
    return context if window is None else min(context, window)
