"""Weight bytes, KV bytes and FLOPs. These are the only formulas, and all code uses them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from shardline.config.topology import RankPlace
from shardline.models.kv_shapes import kv_parts
from shardline.models.parameters import (
    Shape,
    expert_of,
    is_kept_in_float32,
    is_linear,
    layer_parameters,
    parameters,
    parse_name,
    stage_parameters,
)
from shardline.models.partition import (
    ExpertShare,
    KVGroup,
    Span,
    balance_stages,
    parse_stages,
    split_dim,
    split_heads,
)
from shardline.models.sharding import Numerics, shard, shard_shape
from shardline.models.spec import DTYPE_BYTES, MLA, Attention, DecoderSpec, Dense, DType, KVDType, Layer, MoE
from shardline.weights.base import PLAIN, FormatChoice, Role, WeightFormat


def num_parameters(spec: DecoderSpec) -> int:
    """Number of parameters of the whole model. Tied embeddings count once."""
    return _num_elements(shape for _, shape in parameters(spec))


def stage_spans(spec: DecoderSpec, num_stages: int, pipeline_stages: str | None = None) -> tuple[Span, ...]:
    """The layers of each pipeline stage: those in `pipeline_stages` ("10,12,10") if it is set, else balanced.

    The cost of a layer is the number of weights that a decode step of 32 sequences reads. Of the experts, only the
    expected number of chosen ones counts. The embedding costs a row per sequence, and the lm_head all of its rows.

    Raises:
        ValueError: there are more stages than layers, or `pipeline_stages` does not fit.
    """
    if pipeline_stages is not None:
        return parse_stages(pipeline_stages, len(spec.layers), num_stages)
    batch = 32
    costs = [_num_met(layer, spec.hidden_size, batch) for layer in spec.layers]
    embedding = batch * spec.hidden_size * (1 if spec.learned_positions is None else 2)
    return balance_stages(costs, num_stages, first_extra=embedding, last_extra=spec.vocab_size * spec.hidden_size)


def weight_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    stages: Sequence[Span],
    dtype: DType,
    numerics: Numerics = "exact",
    weight_format: FormatChoice = PLAIN,
    expert_parallel: bool = False,
) -> int:
    """Bytes of the weights that the rank at `place` holds, without padding.

    Linear weights are in `weight_format`, the rest in `dtype`. If the lm_head is tied to the embedding and quantized,
    both are stored. If it is not quantized, one tensor serves both.
    """
    tp_size = len(place.tp_peers)
    experts = ExpertShare(place.ep_peers.index(place.rank), len(place.ep_peers)) if expert_parallel else None
    held = weight_format.open_format()
    total = 0
    for name, shape in _held(spec, stages[place.pp_rank], held):
        local = shard_shape(shape, shard(name, spec, place.tp_rank, tp_size, numerics, experts))
        if is_linear(name):
            total += held.num_bytes(local[0], local[1], DTYPE_BYTES[dtype], _role(name))
        else:
            total += math.prod(local) * DTYPE_BYTES["float32" if is_kept_in_float32(name) else dtype]
    return total


def _role(name: str) -> Role:
    """The role of a linear weight."""
    if name == "lm_head.weight":
        return "lm_head"
    return "layer" if expert_of(parse_name(name).part) is None else "expert"


def largest_weight_bytes(
    spec: DecoderSpec,
    place: RankPlace,
    stages: Sequence[Span],
    dtype: DType,
    numerics: Numerics = "exact",
    expert_parallel: bool = False,
) -> int:
    """Bytes in `dtype` of the largest parameter part that the rank at `place` holds."""
    tp_size = len(place.tp_peers)
    experts = ExpertShare(place.ep_peers.index(place.rank), len(place.ep_peers)) if expert_parallel else None
    held = _held(spec, stages[place.pp_rank], PLAIN.open_format())
    shapes = (shard_shape(shape, shard(name, spec, place.tp_rank, tp_size, numerics, experts)) for name, shape in held)
    return max(map(math.prod, shapes)) * DTYPE_BYTES[dtype]


def kv_bytes_per_token(
    spec: DecoderSpec, place: RankPlace, stages: Sequence[Span], dtype: KVDType, *, latents_shared: bool = True
) -> int:
    """Bytes of keys and values that the rank at `place` stores for a token, summed over its stage's layers.

    A layer with a window stores only the tokens in the window, but counts like any other layer. `latents_shared` says
    that the ranks of a tensor-parallel group share one pool of latents in host memory. Then each rank counts an even
    part of it.
    """
    stage = stages[place.pp_rank]
    layers = range(stage.start, stage.stop)
    return sum(_layer_kv_bytes(spec.layers[index].attention, place, dtype, latents_shared) for index in layers)


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
    """Bytes of one KV block on the rank at `place`.

    A block holds `block_size` tokens of one of the KV `groups`, for the group's layers in the rank's stage. Its size is
    that of the largest group. For `latents_shared` see `kv_bytes_per_token`.
    """
    stage = stages[place.pp_rank]
    return block_size * max(
        sum(
            _layer_kv_bytes(spec.layers[index].attention, place, dtype, latents_shared)
            for index in group.layers
            if stage.start <= index < stage.stop
        )
        for group in groups
    )


def step_bytes(spec: DecoderSpec, dtype: DType, num_tokens: int, num_seqs: int) -> int:
    """The most bytes of activations that are alive at once in a step of `num_tokens`, of which `num_seqs` are sampled.

    Rows are whole. The sum counts the residual stream and its neighbours, the projections of the feed-forward block,
    and the fp32 logits twice.
    """
    widest = max(_projected(layer.feed_forward) for layer in spec.layers)
    activations = num_tokens * (6 * spec.hidden_size + 2 * widest) * DTYPE_BYTES[dtype]
    return activations + 2 * 4 * num_seqs * spec.vocab_size


def _projected(feed_forward: Dense | MoE) -> int:
    """Elements per token in the output of a feed-forward block's first projections."""
    if isinstance(feed_forward, MoE):
        shared = 0 if feed_forward.shared is None else _projected(feed_forward.shared)
        return feed_forward.routing.experts_per_token * _projected(feed_forward.expert) + shared
    return (1 + feed_forward.gated) * feed_forward.intermediate_size


def flops(spec: DecoderSpec, num_tokens: int, context_len: int = 0, num_logits: int = 1) -> int:
    """Floating-point operations of a forward pass over `num_tokens` new tokens of one sequence.

    `context_len` tokens are in its KV cache already, and `num_logits` positions go through the lm_head. Only matrix
    products and attention count. An addition and a multiplication are two operations. A decode step has one new token.
    """
    total = 2 * num_logits * spec.vocab_size * spec.hidden_size
    for layer in spec.layers:
        matrices = round(_num_met(layer, spec.hidden_size, num_tokens=1, dims=2))
        pairs = attended_pairs(num_tokens, context_len, layer.attention.window)
        total += 2 * num_tokens * matrices + 2 * _multiplications_per_pair(layer.attention) * pairs
    return total


def attended_pairs(num_tokens: int, context_len: int, window: int | None) -> int:
    """Number of (query, key) pairs of causal attention if `num_tokens` tokens follow `context_len` cached tokens."""
    stop = context_len + num_tokens
    if window is None or window >= stop:
        return num_tokens * context_len + num_tokens * (num_tokens + 1) // 2
    # Positions below `window` see all tokens before them. The others see exactly `window` tokens.
    growing = max(0, min(stop, window) - context_len)
    return growing * context_len + growing * (growing + 1) // 2 + (num_tokens - growing) * window


def _held(spec: DecoderSpec, stage: Span, held: WeightFormat) -> Iterator[tuple[str, Shape]]:
    """The parameters that a stage holds. A tied lm_head has its own name if it is stored apart."""
    first, last = stage.start == 0, stage.stop == len(spec.layers)
    for name, shape in stage_parameters(spec, stage):
        yield ("lm_head.weight" if name == "embed.weight" and not first else name), shape
    if first and last and spec.tied_embeddings and not held.is_dense("lm_head"):
        yield "lm_head.weight", (spec.vocab_size, spec.hidden_size)


def _multiplications_per_pair(attention: Attention) -> int:
    """Multiplications of one query with one key and its value, over all heads.

    Latent attention computes in the dims of the latent.
    """
    if isinstance(attention, MLA):
        return attention.num_heads * (attention.latent_dim + attention.kv_lora_rank)
    return attention.num_heads * 2 * attention.head_dim


def _layer_kv_bytes(attention: Attention, place: RankPlace, dtype: KVDType, latents_shared: bool) -> int:
    """Bytes of keys and values of one token in one layer on one rank, scales included."""
    if isinstance(attention, MLA):
        if latents_shared and DTYPE_BYTES[dtype] > 1:
            latent = split_dim(attention.latent_dim, len(place.tp_peers))[place.tp_rank]
            return latent.size * DTYPE_BYTES[dtype]
        num_kv_heads = 1
    else:
        shares = split_heads(attention.num_heads, attention.num_kv_heads, len(place.tp_peers))
        num_kv_heads = shares[place.tp_rank].kv_heads.size
    return sum(part.num_bytes for part in kv_parts(attention, num_kv_heads, 1, 1, dtype))


def _num_met(layer: Layer, hidden_size: int, num_tokens: int, dims: int | None = None) -> float:
    """Elements of a layer's parameters that at least one of `num_tokens` tokens uses.

    With `dims`, only parameters with this number of dims count. For experts this is the expected number, if tokens
    choose at random and independently.
    """
    always = experts = 0
    for name, shape in layer_parameters(layer, hidden_size):
        if dims in (None, len(shape)):
            if expert_of(name) is None:
                always += math.prod(shape)
            else:
                experts += math.prod(shape)
    if isinstance(layer.feed_forward, MoE):
        routing = layer.feed_forward.routing
        return always + experts * (1 - (1 - routing.experts_per_token / routing.num_experts) ** num_tokens)
    return always + experts


def _num_elements(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)
