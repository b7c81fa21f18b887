"""Which part of each parameter a tensor-parallel rank holds: the one function that says so."""

from __future__ import annotations

from typing import Literal

from shardline.models.parameters import parse_name
from shardline.models.partition import Span, split_dim, split_heads, split_query_heads
from shardline.models.spec import MLA, Attention, DecoderSpec

Numerics = Literal["exact", "fast"]
Spans = tuple[Span | None, ...]


def shard(name: str, spec: DecoderSpec, tp_rank: int, tp_size: int, numerics: Numerics = "exact") -> Spans:
    """The part of parameter `name` that rank `tp_rank` of `tp_size` holds: per dim a span, or None for all of it.

    Every linear is split by its output: q, k and v by heads, o and down by the hidden size, gate and up by the
    intermediate size, embedding and lm_head by the vocabulary. Numerics "fast" splits o and down by their input
    instead; their biases are then whole, to be added once, after the sum. Norms and learned positions are whole.

    Latent attention's q, q_up and kv_up go by heads; q_down and kv_down are split as one, q_down's rows first, so that
    gathering what the ranks project gives both latents side by side: a span may be empty.

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
    attention, feed_forward = spec.layers[layer].attention, spec.layers[layer].feed_forward
    if part in _projections(attention):
        return _split(0, _projection_span(attention, part, tp_rank, tp_size), whole)
    if part in ("feed_forward.gate", "feed_forward.up"):
        return _split(0, split_dim(feed_forward.intermediate_size, tp_size)[tp_rank], whole)
    if part not in ("attention.o", "feed_forward.down"):
        raise ValueError(f"{name!r} is no canonical parameter name")
    if numerics == "exact":
        return _split(0, split_dim(spec.hidden_size, tp_size)[tp_rank], whole)
    if kind == "bias":
        return whole
    if part == "attention.o":
        heads = split_query_heads(attention, tp_size)[tp_rank]
        width = attention.value_head_dim if isinstance(attention, MLA) else attention.head_dim
        return _split(1, _scaled(heads, width), whole)
    return _split(1, split_dim(feed_forward.intermediate_size, tp_size)[tp_rank], whole)


def shard_shape(shape: tuple[int, ...], spans: Spans) -> tuple[int, ...]:
    """Shape of the part `spans` of a tensor of `shape`."""
    return tuple(size if span is None else span.size for size, span in zip(shape, spans, strict=True))


def _projections(attention: Attention) -> tuple[str, ...]:
    """The parts that turn a layer's input into queries, keys and values."""
    if not isinstance(attention, MLA):
        return "attention.q", "attention.k", "attention.v"
    q_parts = ("attention.q",) if attention.q_lora_rank is None else ("attention.q_down", "attention.q_up")
    return *q_parts, "attention.kv_down", "attention.kv_up"


def _projection_span(attention: Attention, part: str, tp_rank: int, tp_size: int) -> Span:
    if not isinstance(attention, MLA):
        share = split_heads(attention.num_heads, attention.num_kv_heads, tp_size)[tp_rank]
        return _scaled(share.heads if part == "attention.q" else share.kv_heads, attention.head_dim)
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


def _scaled(span: Span, width: int) -> Span:
    return Span(span.start * width, span.stop * width)


def _split(dim: int, span: Span, whole: Spans) -> Spans:
    return (*whole[:dim], span, *whole[dim + 1 :])
