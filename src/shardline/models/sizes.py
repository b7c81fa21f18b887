"""Weight bytes, KV bytes and FLOPs. These are the only formulas, and all code uses them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from shardline.config.topology import RankPlace
from shardline.models.attention import Attention
from shardline.models.communication import count_layers
from shardline.models.kv_groups import KVGroup, joined_layers, stores_tokens
from shardline.models.linear_attention import LinearAttention
from shardline.models.parameters import (
    CountedParameter,
    counted_parameters,
    embeds_tokens,
    expert_of,
    is_kept_in_float32,
    is_linear,
    is_looked_up,
    parse_name,
    role_of,
)
from shardline.models.partition import Span, balance_stages, parse_stages, split_dim
from shardline.models.parts import DTYPE_BYTES, DType, KVDType, KVPart, Shape
from shardline.models.sharding import Numerics, shard, shard_shape
from shardline.models.spec import DecoderSpec, Layer
from shardline.models.stored_weights import StoredWeights
from shardline.weights.base import PLAIN, FormatChoice, WeightFormat

_STAGE_BATCH = 32
"""Sequences of the decode step by which stages are balanced."""
_STAGE_CONTEXT = 512
"""Tokens of each of them."""
_SAMPLED = 0.5
"""Share of all tokens that need the lm_head: those of prompts do not."""


def num_parameters(spec: DecoderSpec) -> int:
    """Number of parameters of the whole model. Tied embeddings count once."""
    return sum(
        math.prod(one.shape) * one.num_layers * max(1, one.num_experts)
        for one in counted_parameters(spec, Span(0, len(spec.layers)))
    )


@functools.lru_cache(maxsize=256)
def stage_spans(
    spec: DecoderSpec, num_stages: int, pipeline_stages: str | None = None, beside: float = 0.0
) -> tuple[Span, ...]:
    """The layers of each pipeline stage: those in `pipeline_stages` ("10,12,10") if it is set, else balanced.

    The cost of a layer is the number of weights, keys and values that a decode step of 32 sequences of 512 tokens
    reads. Of the experts, only the expected number of chosen ones counts. The embedding costs a row per sequence, and
    the lm_head half of its rows. `beside`: what a second model reads on the last stage, see `decode_elements`.

    Raises:
        ValueError: there are too many stages, or `pipeline_stages` does not fit.
    """
    if pipeline_stages is not None:
        return parse_stages(pipeline_stages, len(spec.layers), num_stages, joined_layers(spec))
    embedding = _STAGE_BATCH * spec.hidden_size * (1 if spec.learned_positions is None else 2)
    last = _SAMPLED * spec.vocab_size * spec.hidden_size + beside
    return balance_stages(_layer_costs(spec), num_stages, embedding, last, joined_layers(spec))


def stage_bubbles(spec: DecoderSpec, stages: Sequence[Span]) -> tuple[float, float]:
    """The share of their time in which stages wait for the slowest one, if they wait for nothing else: in steps that
    decode, and in those of prompts."""
    costs = _layer_costs(spec)
    layers = [sum(costs[stage.start : stage.stop]) for stage in stages]
    decoding = [*layers[:-1], layers[-1] + spec.vocab_size * spec.hidden_size]
    decode, prompts = (1 - sum(work) / len(work) / max(work) for work in (decoding, layers))
    return decode, prompts


def decode_elements(spec: DecoderSpec) -> float:
    """The number of weights, keys and values that a decode step of 32 sequences reads, see `stage_spans`."""
    return sum(_layer_costs(spec)) + spec.vocab_size * spec.hidden_size


def _layer_costs(spec: DecoderSpec) -> list[float]:
    distinct = {id(layer): layer for layer in spec.layers}
    read = {
        key: _num_met(layer, spec.hidden_size, _STAGE_BATCH) + _STAGE_BATCH * _num_cached(layer.attention)
        for key, layer in distinct.items()
    }
    return [read[id(layer)] for layer in spec.layers]


def _num_cached(attention: Attention) -> float:
    """Elements of the cache that a token reads in a layer."""
    seen = ((one.bytes_per_token, one.window) for one in attention.work(1, "bfloat16"))
    num_bytes = sum(each * min(_STAGE_CONTEXT, window or _STAGE_CONTEXT) for each, window in seen)
    return num_bytes / DTYPE_BYTES["bfloat16"]


class OwnFormats(NamedTuple):
    """The formats of linear weights that a checkpoint has quantized in unlike ways."""

    format_of: Callable[[str], FormatChoice]
    """The format of a weight, by its canonical name."""
    layer_class: Callable[[int], Hashable]
    """Equal for layers whose weights have the same formats."""


def weight_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    stages: Sequence[Span],
    dtype: DType,
    numerics: Numerics = "exact",
    weight_format: FormatChoice = PLAIN,
    expert_parallel: bool = False,
    own_formats: OwnFormats | None = None,
    redundant_experts: int = 0,
) -> int:
    """Bytes of the weights that the rank at `place` holds, without padding. The ranks that share a layer's experts have
    places for `redundant_experts` further copies.

    Linear weights are in `weight_format`, or each in its own of `own_formats`, and the rest in `dtype`. If the lm_head
    is tied to the embedding and quantized here, both are stored. If it is as in the checkpoint, one tensor serves both.
    """
    return _weight_bytes(
        spec, place, tuple(stages), dtype, numerics, weight_format, expert_parallel, own_formats, redundant_experts
    )


@functools.lru_cache(maxsize=512)
def _weight_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    stages: tuple[Span, ...],
    dtype: DType,
    numerics: Numerics,
    weight_format: FormatChoice,
    expert_parallel: bool,
    own_formats: OwnFormats | None,
    redundant_experts: int,
) -> int:
    """See `weight_bytes`. The planner asks for the same ranks again and again."""
    held = weight_format.open_format()
    num_bytes = _bytes_in_format(spec, dtype, held, own_formats)
    stage = stages[place.pp_rank]
    counted = counted_parameters(spec, stage, own_formats.layer_class) if own_formats else _counted(spec, stage)
    tied = spec.tied_embeddings
    keeps_head = tied and held.packs_embedding
    # A tied lm_head is packed as the checkpoint packs the embedding.
    head = _head_name(spec)
    if tied and own_formats is not None:
        keeps_head = not own_formats.format_of(head).open_format().is_dense("lm_head")
    apart = tied and not held.reads_packed and not held.is_dense("lm_head") and not held.packs_embedding
    parameters = _held(counted, spec, stage, apart, keeps_head)
    return rank_total(
        spec, place, parameters, num_bytes, numerics, expert_parallel, redundant_experts=redundant_experts
    )


def _head_name(spec: DecoderSpec) -> str:
    return "embed.weight" if spec.tied_embeddings else "lm_head.weight"


def _bytes_in_format(
    spec: DecoderSpec, dtype: DType, held: WeightFormat, own_formats: OwnFormats | None
) -> Callable[[str, Shape], int]:
    """The bytes of a parameter's part, by its name and shape."""
    head = _head_name(spec)

    def num_bytes(name: str, local: Shape) -> int:
        if is_linear(name):
            stored = head if name == "lm_head.weight" else name
            own = held if own_formats is None else own_formats.format_of(stored).open_format()
            return own.num_bytes(local[0], local[1], DTYPE_BYTES[dtype], role_of(name))
        if name == "embed.weight" and (own_formats is not None or held.packs_embedding):
            own = held if own_formats is None else own_formats.format_of(name).open_format()
            return own.num_bytes(local[0], local[1], DTYPE_BYTES[dtype], "lm_head")
        return math.prod(local) * DTYPE_BYTES["float32" if is_kept_in_float32(name) else dtype]

    return num_bytes


def layer_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    layer: int,
    dtype: DType,
    numerics: Numerics,
    weight_format: FormatChoice,
    expert_parallel: bool,
    own_formats: OwnFormats | None,
    only_experts: bool = False,
) -> int:
    """Bytes of the weights of one layer that the rank at `place` holds, or of its experts, without padding."""
    counted = counted_parameters(
        spec, Span(layer, layer + 1), own_formats.layer_class if own_formats else lambda index: None
    )
    own = [one for one in counted if parse_name(one.name).layer is not None]
    if only_experts:
        own = [one for one in own if one.num_experts]
    num_bytes = _bytes_in_format(spec, dtype, weight_format.open_format(), own_formats)
    return rank_total(spec, place, own, num_bytes, numerics, expert_parallel)


@functools.lru_cache(maxsize=64)
def _counted(spec: DecoderSpec, stage: Span) -> tuple[CountedParameter, ...]:
    """The parameters of a stage whose weights all have one format."""
    return tuple(counted_parameters(spec, stage))


def stored_weight_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    stages: Sequence[Span],
    stored: StoredWeights,
    *,
    whole: Collection[str] = (),
    expert_parallel: bool = False,
) -> int:
    """Bytes of the rank's part of a checkpoint's weights if an engine keeps them as they are stored.

    Output projections are split by their input, as with numerics "fast". Every rank has the parts in `whole`
    (canonical parts, such as "attention.kv_down") undivided. A tied lm_head is not stored apart.
    """
    counted = counted_parameters(spec, stages[place.pp_rank], stored.layer_class)
    held = _held(counted, spec, stages[place.pp_rank], False)
    return rank_total(spec, place, held, stored.num_bytes, "fast", expert_parallel, whole)


def checkpoint_bytes(spec: DecoderSpec, stored: StoredWeights) -> int:
    """Bytes of the whole checkpoint. Tied embeddings count once."""
    return sum(
        stored.num_bytes(one.name, one.shape) * one.num_layers * max(1, one.num_experts)
        for one in counted_parameters(spec, Span(0, len(spec.layers)), stored.layer_class)
    )


def rank_total(
    spec: DecoderSpec,
    place: RankPlace,
    held: Iterable[CountedParameter],
    num_bytes: Callable[[str, Shape], int],
    numerics: Numerics,
    expert_parallel: bool,
    whole: Collection[str] = (),
    redundant_experts: int = 0,
) -> int:
    """Sum of `num_bytes(name, local shape)` over the rank's parts of the parameters in `held`."""
    parts = _local_parts(spec, place, held, numerics, expert_parallel, whole, redundant_experts)
    return sum(count * num_bytes(name, local) for name, local, count in parts)


def _local_parts(
    spec: DecoderSpec,
    place: RankPlace,
    held: Iterable[CountedParameter],
    numerics: Numerics,
    expert_parallel: bool,
    whole: Collection[str] = (),
    redundant_experts: int = 0,
) -> Iterator[tuple[str, Shape, int]]:
    """(name, local shape, how many the rank has of this shape) for each of the parameters in `held`."""
    tp_size, experts = len(place.peers("tensor")), place.peers("expert")
    for name, shape, num_layers, num_experts in held:
        if num_experts and expert_parallel:
            places = split_dim(num_experts + redundant_experts, len(experts))
            yield name, shape, num_layers * places[experts.index(place.rank)].size
        elif whole and parse_name(name).part in whole:
            yield name, shape, num_layers
        else:
            local = shard_shape(shape, shard(name, spec, place.share, tp_size, numerics))
            yield name, local, num_layers * max(1, num_experts)


def largest_weight_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    stages: Sequence[Span],
    dtype: DType,
    numerics: Numerics = "exact",
    expert_parallel: bool = False,
) -> int:
    """Bytes in `dtype` of the largest parameter part that the rank at `place` holds."""
    stage = stages[place.pp_rank]
    held = _held(counted_parameters(spec, stage), spec, stage, False)
    parts = _local_parts(spec, place, held, numerics, expert_parallel)
    return max(math.prod(local) for _, local, count in parts if count) * DTYPE_BYTES[dtype]


def kv_bytes_per_token(
    spec: DecoderSpec, place: RankPlace, stages: Sequence[Span], dtype: KVDType, *, latents_shared: bool = True
) -> int:
    """Bytes of keys and values that the rank at `place` stores for a token, summed over its stage's layers.

    A layer with a window stores only the tokens in the window, but counts like any other layer. A layer that reads the
    cache of another layer stores nothing. `latents_shared` says
    that the ranks of a tensor-parallel group share one pool of latents in host memory. Then each rank counts an even
    part of it. If ranks share the keys of a request, this is an even part of a token that one of them has.
    """
    stage = stages[place.pp_rank]
    storing = [layer.attention for layer in spec.layers[stage.start : stage.stop] if stores_tokens(layer.attention)]
    num_bytes = sum(_layer_kv_bytes(attention, place, dtype, latents_shared) for attention in storing)
    return -(-num_bytes // len(place.peers("context")))


def kv_block_bytes(
    spec: DecoderSpec,
    groups: Sequence[KVGroup],
    place: RankPlace,
    stages: Sequence[Span],
    dtype: KVDType,
    block_size: int,
    *,
    latents_shared: bool = True,
) -> int:
    """Bytes of one KV block on the rank at `place`. If ranks share the keys of a request, one of them has the block,
    and this is an even part of it.

    A block holds `block_size` tokens of one of the KV `groups`, for the group's layers in the rank's stage. It is as
    deep as the deepest group. Groups with heads of other shapes have pages of their own, so their sizes add up. For
    `latents_shared` see `kv_bytes_per_token`.
    """
    stage = stages[place.pp_rank]
    deepest: dict[tuple[KVPart, ...], tuple[int, int]] = {}
    for group in groups:
        attention = spec.layers[group.layers[0]].attention
        shape = attention.kv_parts(_local_kv_heads(attention, place), 1, 1, dtype)
        depth = sum(stage.start <= index < stage.stop for index in group.layers)
        size = _layer_kv_bytes(attention, place, dtype, latents_shared)
        deepest[shape] = max(deepest.get(shape, (0, size)), (depth, size))
    return -(-block_size * sum(depth * size for depth, size in deepest.values()) // len(place.peers("context")))


def state_bytes(spec: DecoderSpec, place: RankPlace, stages: Sequence[Span], dtype: DType = "bfloat16") -> int:
    """Bytes of the states of one request on the rank at `place`, for activations of `dtype`."""
    stage, ranks = stages[place.pp_rank], len(place.peers("tensor"))
    own = spec.layers[stage.start : stage.stop]
    return sum(layer.attention.state_bytes(place.share, ranks, dtype) for layer in own)


@functools.lru_cache(maxsize=256)
def step_bytes(spec: DecoderSpec, dtype: DType, num_tokens: int, num_seqs: int) -> int:
    """The most bytes of activations that are alive at once in a step of `num_tokens`, of which `num_seqs` are sampled.

    Rows are whole. The sum counts residual streams and their neighbours, the projections of the feed-forward block, the
    layers' inputs for each token, the choice of tokens, and the fp32 logits twice.
    """
    widest = max(layer.feed_forward.projected_size for layer in spec.layers)
    inputs = 0 if spec.token_input is None else 4 * len(spec.layers) * spec.token_input.size
    hidden = (5 + spec.residual_streams) * spec.hidden_size
    activations = num_tokens * (hidden + 2 * widest + inputs) * DTYPE_BYTES[dtype]
    return activations + choice_bytes(spec, num_tokens) + 2 * 4 * num_seqs * spec.vocab_size


def choice_bytes(spec: DecoderSpec, num_tokens: int) -> int:
    """The slots (int64) of the tokens that an indexer chooses for `num_tokens`, twice: those of the rows that need
    them, and of all rows."""
    return 2 * 8 * num_tokens * max(layer.attention.num_chosen for layer in spec.layers)


def state_step_bytes(spec: DecoderSpec, num_tokens: int, num_seqs: int) -> int:
    """What torch has in memory while a layer advances the states of `num_seqs` sequences by `num_tokens` tokens: about
    four copies of them in float32, and six of what is projected."""
    sizes = [layer.attention.state_bytes(0, 1, "float32") for layer in set(spec.layers)]
    attentions = [layer.attention for layer in set(spec.layers) if isinstance(layer.attention, LinearAttention)]
    widths = [attention.state_sizes(0, 1).num_channels + attention.output_size for attention in attentions]
    return 4 * num_seqs * max(sizes) + 6 * 4 * num_tokens * max(widths, default=0)


def flops(spec: DecoderSpec, num_tokens: int, context_len: int = 0, num_logits: int = 1) -> int:
    """Floating-point operations of a forward pass over `num_tokens` new tokens of one sequence.

    `context_len` tokens are in its KV cache already, and `num_logits` positions go through the lm_head. Only matrix
    products and attention count. An addition and a multiplication are two operations. A decode step has one new token.
    """
    total = 2 * num_logits * spec.vocab_size * spec.hidden_size
    for layer, count in count_layers(spec, Span(0, len(spec.layers))):
        matrices = round(_num_met(layer, spec.hidden_size, num_tokens=1, dims=2))
        pairs = attended_pairs(num_tokens, context_len, layer.attention.window)
        total += count * (2 * num_tokens * matrices + 2 * layer.attention.multiplications_per_pair * pairs)
    return total


def attended_pairs(num_tokens: int, context_len: int, window: int | None) -> int:
    """Number of (query, key) pairs of causal attention if `num_tokens` tokens follow `context_len` cached tokens."""
    stop = context_len + num_tokens
    if window is None or window >= stop:
        return num_tokens * context_len + num_tokens * (num_tokens + 1) // 2
    # Positions below `window` see all tokens before them. The others see exactly `window` tokens.
    growing = max(0, min(stop, window) - context_len)
    return growing * context_len + growing * (growing + 1) // 2 + (num_tokens - growing) * window


def _held(
    counted: Iterable[CountedParameter],
    spec: DecoderSpec,
    stage: Span,
    head_is_apart: bool,
    head_is_packed: bool = False,
) -> Iterator[CountedParameter]:
    """The parameters that a stage holds. A tied lm_head has its own name if it is stored apart, or is packed and serves
    as the embedding too."""
    embeds, last = embeds_tokens(spec, stage), stage.stop == len(spec.layers)
    is_head = not embeds or (last and head_is_packed)
    for one in counted:
        yield one._replace(name="lm_head.weight") if one.name == "embed.weight" and is_head else one
    if embeds and last and head_is_apart:
        yield CountedParameter("lm_head.weight", (spec.vocab_size, spec.hidden_size), 1, 0)


def _layer_kv_bytes(attention: Attention, place: RankPlace, dtype: KVDType, latents_shared: bool) -> int:
    """Bytes of keys and values of one token in one layer on one rank, scales included."""
    num_bytes = sum(part.num_bytes for part in attention.kv_parts(_local_kv_heads(attention, place), 1, 1, dtype))
    if attention.shares_cache and latents_shared:
        return split_dim(num_bytes, len(place.peers("tensor")), unit=DTYPE_BYTES[dtype])[place.share].size
    return num_bytes


def _local_kv_heads(attention: Attention, place: RankPlace) -> int:
    return sum(attention.kv_heads_held(len(place.peers("tensor")), len(place.peers("context")), place.share))


def _num_met(layer: Layer, hidden_size: int, num_tokens: int, dims: int | None = None) -> float:
    """Elements of a layer's parameters that at least one of `num_tokens` tokens uses. Tables do not count.

    With `dims`, only parameters with this number of dims count. For experts this is the expected number, if tokens
    choose at random and independently.
    """
    always = of_expert = 0
    for name, shape in layer.parameters(hidden_size, num_experts=1):
        if dims in (None, len(shape)) and not is_looked_up(name):
            if expert_of(name) is None:
                always += math.prod(shape)
            else:
                of_expert += math.prod(shape)
    routing = layer.feed_forward.routing
    return always if routing is None else always + of_expert * routing.experts_met(num_tokens)
