"""Which part of each parameter a tensor-parallel rank holds. `shard` is the only function that decides this."""

from __future__ import annotations

from typing import Literal

from shardline.models.compressed import CompressedMQA
from shardline.models.parameters import expert_of, parse_name
from shardline.models.partition import ExpertShare, Span, split_dim, split_heads, split_query_heads
from shardline.models.spec import GQA, Attention, DecoderSpec, Dense, LinearAttention, MoE, PlannedGQA

Numerics = Literal["exact", "fast"]
Spans = tuple[Span | None, ...]
_WHOLE_PARTS = (
    "feed_forward.router",
    "feed_forward.router_logits",
    "feed_forward.expert_scale",
    "feed_forward.shared_gate",
    "feed_forward.latent_down",
    "feed_forward.latent_up",
)


def shard(
    name: str,
    spec: DecoderSpec,
    tp_rank: int,
    tp_size: int,
    numerics: Numerics = "exact",
    experts: ExpertShare | None = None,
) -> Spans:
    """The part of parameter `name` that rank `tp_rank` of `tp_size` holds: per dim a span, or None for the whole dim.

    Every linear is split by its output: q, k and v by heads, o and down by the hidden size, gate and up by the
    intermediate size, embedding and lm_head by the vocabulary. With numerics "fast", o and down are split by their
    input instead. Their biases are then whole, since they are added once, after the sum. Norms, learned positions,
    routers and gates of shared experts are whole. Experts are split like any other feed-forward block. With `experts`,
    each expert is whole on one rank and has no rows on the others. A layer's inputs for each token are split by their
    elements, but their projection is whole, since its norm needs whole rows.

    In latent attention, q, q_up and kv_up are split by heads. q_down and kv_down are split like one weight with
    q_down's rows first. So a gather of the ranks' projections gives both latents side by side. A span may be empty.
    Compressed attention has whole parts but for q_up, o_down and o, which are split by heads, groups and like any o.

    Raises:
        ValueError: the name is not a parameter of a decoder, or this number of ranks cannot share the heads.
    """
    layer, part, kind = parse_name(name)
    whole: Spans = (None, None) if kind == "weight" else (None,)
    if layer is None:
        if part in ("embed", "lm_head"):
            return _split(0, split_dim(spec.vocab_size, tp_size)[tp_rank], whole)
        if part in ("positions", "head_streams"):
            return whole
        if part in ("final_norm", "token_input_norm"):
            return (None,)
        raise ValueError(f"{name!r} is no canonical parameter name")
    if part.endswith("norm") or part == "output_scale":
        return (None,)
    if part.startswith(("attention.indexer", "attention.compressor")) or part.endswith("_streams"):
        return (None, None) if part.endswith("_position") else whole
    if part.startswith("feed_forward."):
        return _shard_feed_forward(name, spec, tp_rank, tp_size, numerics, experts)
    if part.startswith("token_input."):
        return _shard_token_input(name, spec, tp_rank, tp_size, numerics)
    attention = spec.layers[layer].attention
    if part in _projections(attention):
        return _split(0, _projection_span(attention, part, tp_rank, tp_size), whole)
    if part == "attention.sinks":
        return (split_query_heads(attention, tp_size)[tp_rank],)
    if part != "attention.o":
        raise ValueError(f"{name!r} is no canonical parameter name")
    if numerics == "exact":
        return _split(0, split_dim(spec.hidden_size, tp_size)[tp_rank], whole)
    if kind == "bias":
        return whole
    if isinstance(attention, CompressedMQA):
        return _split(1, _output_rows(attention, tp_rank, tp_size), whole)
    heads = split_query_heads(attention, tp_size)[tp_rank]
    return _split(1, _scaled(heads, _output_width(attention)), whole)


def _output_width(attention: Attention) -> int:
    """Elements of attention's output per query head."""
    if isinstance(attention, LinearAttention):
        return attention.value_size // attention.num_key_heads
    return attention.value_head_dim


def _shard_feed_forward(
    name: str, spec: DecoderSpec, tp_rank: int, tp_size: int, numerics: Numerics, experts: ExpertShare | None
) -> Spans:
    layer, part, kind = parse_name(name)
    assert layer is not None
    whole: Spans = (None, None) if kind == "weight" else (None,)
    feed_forward = spec.layers[layer].feed_forward
    block, _, projection = part.rpartition(".")
    if isinstance(feed_forward, MoE) and part in _WHOLE_PARTS:
        return whole
    expert = expert_of(part)
    dense = _dense_block(feed_forward, block)
    if dense is None or projection not in ("gate", "up", "down"):
        raise ValueError(f"{name!r} is no canonical parameter name")
    if experts is not None and expert is not None:
        assert isinstance(feed_forward, MoE)
        mine = split_dim(feed_forward.routing.num_experts, experts.size)[experts.rank]
        return whole if mine.start <= expert < mine.stop else _split(0, Span(0, 0), whole)
    if projection != "down":
        return _split(0, split_dim(dense.intermediate_size, tp_size)[tp_rank], whole)
    if numerics == "exact":
        latent = feed_forward.latent_size if isinstance(feed_forward, MoE) and expert is not None else None
        return _split(0, split_dim(latent or spec.hidden_size, tp_size)[tp_rank], whole)
    return whole if kind == "bias" else _split(1, split_dim(dense.intermediate_size, tp_size)[tp_rank], whole)


def _shard_token_input(name: str, spec: DecoderSpec, tp_rank: int, tp_size: int, numerics: Numerics) -> Spans:
    part, whole, token_input = parse_name(name).part, (None, None), spec.token_input
    if token_input is None:
        raise ValueError(f"{name!r} is no parameter of this model")
    own = split_dim(token_input.size, tp_size)[tp_rank]
    if part == "token_input.projection":
        return whole
    if part == "token_input.embed":
        return _split(1, own, whole)
    if part == "token_input.gate":
        return _split(0, own, whole)
    if part != "token_input.down":
        raise ValueError(f"{name!r} is no canonical parameter name")
    return (
        _split(0, split_dim(spec.hidden_size, tp_size)[tp_rank], whole)
        if numerics == "exact"
        else _split(1, own, whole)
    )


def _dense_block(feed_forward: Dense | MoE, block: str) -> Dense | None:
    """The Dense whose linears have names below `block`; None if there is none."""
    if isinstance(feed_forward, Dense):
        return feed_forward if block == "feed_forward" else None
    if block == "feed_forward.shared":
        return feed_forward.shared
    return feed_forward.expert if expert_of(f"{block}.") is not None else None


def shard_shape(shape: tuple[int, ...], spans: Spans) -> tuple[int, ...]:
    """Shape of the part `spans` of a tensor with `shape`."""
    return tuple(size if span is None else span.size for size, span in zip(shape, spans, strict=True))


def _projections(attention: Attention) -> tuple[str, ...]:
    """The parts that turn a layer's input into queries, keys and values."""
    if isinstance(attention, LinearAttention):
        return tuple(f"attention.{part}" for part in ("qkv", "z", "beta", "decay", "conv", "decay_log", "decay_offset"))
    if isinstance(attention, CompressedMQA):
        return "attention.q_down", "attention.q_up", "attention.kv_down", "attention.o_down"
    if isinstance(attention, GQA):
        return "attention.q", "attention.k", "attention.v"
    q_parts = ("attention.q",) if attention.q_lora_rank is None else ("attention.q_down", "attention.q_up")
    return *q_parts, "attention.kv_down", "attention.kv_up"


def _projection_span(attention: Attention, part: str, tp_rank: int, tp_size: int) -> Span:
    if isinstance(attention, LinearAttention):
        num_rows = attention.conv_size if part in ("attention.qkv", "attention.conv") else attention.num_value_heads
        num_rows = attention.value_size if part == "attention.z" else num_rows
        return _scaled(split_query_heads(attention, tp_size)[tp_rank], num_rows // attention.num_key_heads)
    if isinstance(attention, CompressedMQA):
        if part == "attention.o_down":
            return _output_rows(attention, tp_rank, tp_size)
        if part == "attention.q_up":
            return _scaled(split_query_heads(attention, tp_size)[tp_rank], attention.head_dim)
        return Span(0, attention.query_rank if part == "attention.q_down" else attention.head_dim)
    if isinstance(attention, GQA):
        share = split_heads(attention.num_heads, attention.num_kv_heads, tp_size)[tp_rank]
        width = attention.value_head_dim if part == "attention.v" else attention.head_dim
        if isinstance(attention, PlannedGQA) and part == "attention.q":
            width *= 1 + attention.output_gate
        return _scaled(share.heads if part == "attention.q" else share.kv_heads, width)
    if part in ("attention.q_down", "attention.kv_down"):
        q_rank = attention.q_lora_rank or 0
        rows = split_dim(q_rank + attention.latent_dim, tp_size)[tp_rank]
        if part == "attention.q_down":
            return Span(min(rows.start, q_rank), min(rows.stop, q_rank))
        return Span(max(rows.start - q_rank, 0), max(rows.stop - q_rank, 0))
    heads = split_query_heads(attention, tp_size)[tp_rank]
    if part == "attention.kv_up":
        return _scaled(heads, attention.nope_head_dim + attention.value_head_dim)
    return _scaled(heads, attention.query_head_dim)


def _output_rows(attention: CompressedMQA, tp_rank: int, tp_size: int) -> Span:
    """The rows of o_down that a rank has: those of whole groups of heads."""
    return _scaled(split_dim(attention.output_groups, tp_size)[tp_rank], attention.output_rank)


def _scaled(span: Span, width: int) -> Span:
    return Span(span.start * width, span.stop * width)


def _split(dim: int, span: Span, whole: Spans) -> Spans:
    return (*whole[:dim], span, *whole[dim + 1 :])
