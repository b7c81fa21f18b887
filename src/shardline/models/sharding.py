"""Which part of each parameter a tensor-parallel rank holds: the one function that says so."""

from __future__ import annotations

from typing import Literal

from shardline.models.parameters import expert_of, parse_name
from shardline.models.partition import ExpertShare, Span, split_dim, split_heads
from shardline.models.spec import GQA, DecoderSpec, Dense, MoE

Numerics = Literal["exact", "fast"]
Spans = tuple[Span | None, ...]


def shard(
    name: str,
    spec: DecoderSpec,
    tp_rank: int,
    tp_size: int,
    numerics: Numerics = "exact",
    experts: ExpertShare | None = None,
) -> Spans:
    """The part of parameter `name` that rank `tp_rank` of `tp_size` holds: per dim a span, or None for all of it.

    Every linear is split by its output: q, k and v by heads, o and down by the hidden size, gate and up by the
    intermediate size, embedding and lm_head by the vocabulary. Numerics "fast" splits o and down by their input
    instead; their biases are then whole, to be added once, after the sum. Norms, learned positions, routers and gates
    of shared experts are whole. Experts are split like any other feed-forward block; with `experts` each is whole on
    one rank, and has no rows on the others.

    Raises:
        ValueError: the name is no parameter of a decoder, or the heads cannot be shared by so many ranks.
    """
    layer, part, kind = parse_name(name)
    whole: Spans = (None, None) if kind == "weight" else (None,)
    if layer is None:
        if part in ("embed", "lm_head"):
            return _split(0, split_dim(spec.vocab_size, tp_size)[tp_rank], whole)
        if part == "positions":
            return whole
        if part == "final_norm":
            return (None,)
        raise ValueError(f"{name!r} is no canonical parameter name")
    if part.endswith("norm"):
        return (None,)
    if part.startswith("feed_forward."):
        return _shard_feed_forward(name, spec, tp_rank, tp_size, numerics, experts)
    attention = spec.layers[layer].attention
    if part in ("attention.q", "attention.k", "attention.v"):
        return _split(0, _head_span(attention, part, tp_rank, tp_size), whole)
    if part != "attention.o":
        raise ValueError(f"{name!r} is no canonical parameter name")
    if numerics == "exact":
        return _split(0, split_dim(spec.hidden_size, tp_size)[tp_rank], whole)
    if kind == "bias":
        return whole
    return _split(1, _head_span(attention, "attention.q", tp_rank, tp_size), whole)


def _shard_feed_forward(
    name: str, spec: DecoderSpec, tp_rank: int, tp_size: int, numerics: Numerics, experts: ExpertShare | None
) -> Spans:
    layer, part, kind = parse_name(name)
    assert layer is not None
    whole: Spans = (None, None) if kind == "weight" else (None,)
    feed_forward = spec.layers[layer].feed_forward
    block, _, projection = part.rpartition(".")
    if isinstance(feed_forward, MoE) and part in ("feed_forward.router", "feed_forward.shared_gate"):
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
        return _split(0, split_dim(spec.hidden_size, tp_size)[tp_rank], whole)
    return whole if kind == "bias" else _split(1, split_dim(dense.intermediate_size, tp_size)[tp_rank], whole)


def _dense_block(feed_forward: Dense | MoE, block: str) -> Dense | None:
    """The block of linears that parts below `block` belong to."""
    if isinstance(feed_forward, Dense):
        return feed_forward if block == "feed_forward" else None
    if block == "feed_forward.shared":
        return feed_forward.shared
    return feed_forward.expert if expert_of(f"{block}.") is not None else None


def shard_shape(shape: tuple[int, ...], spans: Spans) -> tuple[int, ...]:
    """Shape of the part `spans` of a tensor of `shape`."""
    return tuple(size if span is None else span.size for size, span in zip(shape, spans, strict=True))


def _head_span(attention: GQA, part: str, tp_rank: int, tp_size: int) -> Span:
    share = split_heads(attention.num_heads, attention.num_kv_heads, tp_size)[tp_rank]
    heads = share.heads if part == "attention.q" else share.kv_heads
    return Span(heads.start * attention.head_dim, heads.stop * attention.head_dim)


def _split(dim: int, span: Span, whole: Spans) -> Spans:
    return (*whole[:dim], span, *whole[dim + 1 :])
