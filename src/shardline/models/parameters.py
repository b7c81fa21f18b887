"""Every parameter of a DecoderSpec by its canonical name: the one list that loader, dummy weights and sizes share.

Names: `embed.weight` [vocab, hidden], `positions.weight` [positions, hidden], `final_norm.*`, `lm_head.*`, and
per layer `layers.{i}.` + `attention.{q,k,v,o}.*`, `attention.{q_norm,k_norm}.weight`, `feed_forward.{gate,up,down}.*`,
`{attention_norm,post_attention_norm,feed_forward_norm,post_feed_forward_norm}.*`. A linear weight is [out, in].

Latent attention has `attention.q`, or `attention.{q_down,q_norm,q_up}`; `attention.{kv_down,kv_norm,kv_up}` and
`attention.o`. `kv_down` gives the latent and below it the part of the key that is rotated; `kv_up` has, head after
head, the rows of the key's other part and those of the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardline.models.partition import Span
from shardline.models.spec import GQA, MLA, Attention, DecoderSpec, Dense, Layer, Norm

Shape = tuple[int, ...]


class ParameterName(NamedTuple):
    """A canonical name taken apart: "layers.3.attention.q.bias" is (3, "attention.q", "bias")."""

    layer: int | None
    part: str
    kind: str


def parse_name(name: str) -> ParameterName:
    """`name` taken apart.

    Raises:
        ValueError: it has not the form of a canonical name.
    """
    module, _, kind = name.rpartition(".")
    layer = None
    if module.startswith("layers."):
        index, _, module = module.removeprefix("layers.").partition(".")
        layer = int(index) if index.isdecimal() else -1
    if not module or kind not in ("weight", "bias") or layer == -1:
        raise ValueError(f"{name!r} is no canonical parameter name")
    return ParameterName(layer, module, kind)


def is_linear(name: str) -> bool:
    """Whether `name` is the weight of a linear layer, which can be quantized: of a layer's projection, or the lm_head.

    Not `attention.kv_up`: absorbed, it is multiplied from both sides, so that it has no rows of one meaning.
    """
    layer, part, kind = parse_name(name)
    if kind != "weight" or part.endswith("norm") or part == "attention.kv_up":
        return False
    return layer is not None or part == "lm_head"


def parameters(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    """(name, full shape) of every parameter, in the order of computation; with tied embeddings there is no
    `lm_head.weight`."""
    yield from stage_parameters(spec, Span(0, len(spec.layers)))


def stage_parameters(spec: DecoderSpec, layers: Span) -> Iterator[tuple[str, Shape]]:
    """(name, full shape) of every parameter that a pipeline stage with `layers` needs.

    The first stage has the embeddings, the last the final norm and the lm_head. With tied embeddings a last stage
    that is not the first as well has its own `embed.weight`.
    """
    hidden, vocab = spec.hidden_size, spec.vocab_size
    first, last = layers.start == 0, layers.stop == len(spec.layers)
    if first:
        yield "embed.weight", (vocab, hidden)
        if spec.learned_positions is not None:
            yield "positions.weight", (spec.learned_positions, hidden)
    for index in range(layers.start, layers.stop):
        for part, shape in layer_parameters(spec.layers[index], hidden):
            yield f"layers.{index}.{part}", shape
    if last:
        yield from _norm("final_norm", spec.final_norm, hidden)
        if not spec.tied_embeddings:
            yield "lm_head.weight", (vocab, hidden)
        elif not first:
            yield "embed.weight", (vocab, hidden)
        if spec.lm_head_bias:
            yield "lm_head.bias", (vocab,)


def layer_parameters(layer: Layer, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    """(name without `layers.{i}.`, full shape) of one layer's parameters."""
    yield from _norm("attention_norm", layer.attention_norm, hidden_size)
    yield from _attention(layer.attention, hidden_size)
    yield from _norm("post_attention_norm", layer.post_attention_norm, hidden_size)
    yield from _norm("feed_forward_norm", layer.feed_forward_norm, hidden_size)
    yield from _feed_forward(layer.feed_forward, hidden_size)
    yield from _norm("post_feed_forward_norm", layer.post_feed_forward_norm, hidden_size)


def _attention(attention: Attention, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    yield from _mla(attention, hidden_size) if isinstance(attention, MLA) else _gqa(attention, hidden_size)


def _mla(mla: MLA, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    q_size = mla.num_heads * mla.query_head_dim
    if mla.q_lora_rank is None:
        yield from _linear("attention.q", q_size, hidden_size, False)
    else:
        yield from _linear("attention.q_down", mla.q_lora_rank, hidden_size, mla.bias)
        yield from _norm("attention.q_norm", mla.q_norm, mla.q_lora_rank)
        yield from _linear("attention.q_up", q_size, mla.q_lora_rank, False)
    yield from _linear("attention.kv_down", mla.latent_dim, hidden_size, mla.bias)
    yield from _norm("attention.kv_norm", mla.kv_norm, mla.kv_lora_rank)
    kv_size = mla.num_heads * (mla.nope_head_dim + mla.value_head_dim)
    yield from _linear("attention.kv_up", kv_size, mla.kv_lora_rank, False)
    yield from _linear("attention.o", hidden_size, mla.num_heads * mla.value_head_dim, mla.bias)


def _gqa(attention: GQA, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    for part, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        yield from _linear(f"attention.{part}", size, hidden_size, attention.qkv_bias)
    yield from _norm("attention.q_norm", attention.qk_norm, attention.head_dim)
    yield from _norm("attention.k_norm", attention.qk_norm, attention.head_dim)
    yield from _linear("attention.o", hidden_size, q_size, attention.output_bias)


def _feed_forward(dense: Dense, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    for part in ("gate", "up") if dense.gated else ("up",):
        yield from _linear(f"feed_forward.{part}", dense.intermediate_size, hidden_size, dense.bias)
    yield from _linear("feed_forward.down", hidden_size, dense.intermediate_size, dense.bias)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def _norm(name: str, norm: Norm | None, size: int) -> Iterator[tuple[str, Shape]]:
    if norm is not None:
        yield f"{name}.weight", (size,)
        if norm.bias:
            yield f"{name}.bias", (size,)
