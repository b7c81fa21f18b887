"""What one rank reads, computes and exchanges in a step, as functions of the step's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shardline.config.topology import RankPlace
from shardline.models.attention import AttentionWork
from shardline.models.communication import (
    NOTHING,
    TRAFFIC,
    Exchange,
    Traffic,
    count_layers,
    pipeline_traffic,
)
from shardline.models.feed_forward import Routing
from shardline.models.parameters import CountedParameter, counted_parameters, is_looked_up, parse_name
from shardline.models.partition import Span
from shardline.models.parts import DTYPE_BYTES, KVDType
from shardline.models.sharding import Numerics
from shardline.models.sizes import rank_total, state_bytes
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import StoredWeights

_FOUR_BIT_FLOATS = ("nvfp4", "mxfp4")
_PLAIN_FORMATS = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}


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
    streamed_bytes: float = 0.0
    """Weights that every step reads from a disk, while others compute."""
    streamed_expert_bytes: float = 0.0
    """Experts that are read from a disk when tokens choose them."""
    expert_layer_bytes: float = 0.0
    """All experts of a layer, if some are read from a disk."""

    def weight_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a step with `num_tokens` tokens of each replica reads."""
        return self.dense_bytes + self.expert_bytes * self.share_met(num_tokens)

    def share_met(self, num_tokens: float) -> float:
        """The share of the experts that `num_tokens` tokens of each replica choose, if they choose evenly."""
        if self.routing is None:
            return 0.0
        return self.routing.experts_met(num_tokens * self.replicas) / self.routing.num_experts

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
    stage, tensor, context = stages[place.pp_rank], len(place.peers("tensor")), len(place.peers("context"))
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
        return rank_total(spec, place, parts, count, numerics, whole_experts, whole)

    layers = count_layers(spec, stage)
    routings = [layer.feed_forward.routing for layer, _ in layers]
    routing = next((one for one in reversed(routings) if one is not None), None)
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
        attention=attention_work(spec, stage, tensor // context, kv_dtype, expands=exchange == "vllm", context=context),
        state_bytes=state_bytes(spec, place, stages),
        num_launches=sum(number * layer.num_launches for layer, number in layers) + _format_launches(counted, stored),
        activation_bytes=DTYPE_BYTES[spec.dtype]
        * sum(number * layer.activation_elements(spec.hidden_size, tensor) for layer, number in layers),
        exchanges=tuple(
            (traffic, number)
            for axis, peers in place.groups.items()
            for number in [ranks if axis == "expert" else len(peers)]
            if (traffic := TRAFFIC[axis](spec, stage, number, replicas, exchange)) != NOTHING
        ),
        hand_off=pipeline_traffic(spec, min(2, len(stages)), 1, tensor),
    )


def _format_launches(counted: Sequence[CountedParameter], stored: StoredWeights) -> int:
    """Kernels that formats of weights add to those of `Layer.num_launches`, or save.

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


def attention_work(
    spec: DecoderSpec, stage: Span, tensor: int, dtype: KVDType, *, expands: bool = False, context: int = 1
) -> tuple[AttentionWork, ...]:
    """Attention on one of `tensor` ranks with a KV cache of type `dtype`, for each kind of layer of a stage.

    For `expands` see `Attention.work`. `context`: ranks that share the keys, and the work, of each of these.
    """
    return tuple(
        one.scaled(number / context)
        for layer, number in count_layers(spec, stage)
        for one in layer.attention.work(tensor, dtype, expands=expands)
    )


def _seen(context: float, window: int | None) -> float:
    return context if window is None else min(context, window)
