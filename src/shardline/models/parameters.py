"""Every parameter of a DecoderSpec by its canonical name. Loader, dummy weights and sizes share this list.

Names: `embed.weight` [vocab, hidden], `positions.weight` [positions, hidden], `final_norm.*`, `lm_head.*`, and
per layer `layers.{i}.` + `attention.{q,k,v,o}.*`, `attention.{q_norm,k_norm}.weight`, `feed_forward.{gate,up,down}.*`,
`{attention_norm,post_attention_norm,feed_forward_norm,post_feed_forward_norm}.*`. A linear weight is [out, in].
The scores of attention sinks are `attention.sinks.bias` [heads], and the factor of a layer's output is
`output_scale.bias` [1]. A layer that reads the cache of another layer has no k and v.

If layers have inputs of their own for each token, a layer has `token_input.embed.weight` [vocab, size],
`token_input.{projection,gate}.weight` [size, hidden], `token_input.down.weight` [hidden, size] and
`token_input.norm.weight` [hidden]. The norm of the projections, `token_input_norm.weight` [size], is the model's.

Latent attention has `attention.q` or `attention.{q_down,q_norm,q_up}`, and `attention.{kv_down,kv_norm,kv_up}` and
`attention.o`. The rows of `kv_down` give the latent, then the rotated part of the key. `kv_up` has, for each head in
order, the rows of the key's other part and then the rows of the value.

A mixture of experts has `feed_forward.router.weight` [experts, hidden] and `.bias` [experts] (for choosing only) or
`feed_forward.router_logits.bias` [experts], `feed_forward.expert_scale.bias` [experts], norms of its own
`feed_forward.{router,experts,experts_output,shared_output}_norm.weight`,
`feed_forward.experts.{e}.{gate,up,down}.*`, `feed_forward.shared.{gate,up,down}.*` and
`feed_forward.shared_gate.weight` [1, hidden]. If experts compute in a smaller space, `feed_forward.latent_{down,up}`
lead into it and out of it.

Linear attention has `attention.{qkv,z,beta,decay,o}.weight`, `attention.conv.weight` [channels, width], and per value
head `attention.{decay_log,decay_offset}.bias`; the norm of its outputs is `attention.norm.weight` [value head]. The
indexer of sparse attention has `attention.indexer_{q,k,weights}.weight` and `attention.indexer_norm.*`. For the
parameters of compressed attention and of several residual streams see `compressed.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from shardline.models.compressed import (
    CompressedMQA,
    compressed_parameters,
    head_stream_parameters,
    stream_parameters,
)
from shardline.models.partition import Span
from shardline.models.spec import (
    GQA,
    MLA,
    Attention,
    DecoderSpec,
    Dense,
    Indexer,
    Layer,
    LinearAttention,
    MoE,
    Norm,
    PlannedGQA,
    SparseMLA,
    TokenInput,
)

Shape = tuple[int, ...]


_IN_FLOAT32 = ("attention.sinks", "feed_forward.router", "feed_forward.expert_scale", "output_scale")
_STREAMS = "_streams"
_NEVER_QUANTIZED = (
    *("compressor_kv", "compressor_gate", _STREAMS),
    *("norm", "router", "shared_gate", "kv_up", "beta", "decay", "conv", "indexer_weights"),
    *("token_input.embed", "token_input.projection", "token_input.gate"),
)


class ParameterName(NamedTuple):
    """The parts of a canonical name: "layers.3.attention.q.bias" is (3, "attention.q", "bias")."""

    layer: int | None
    part: str
    kind: str


@functools.lru_cache(maxsize=1 << 16)
def parse_name(name: str) -> ParameterName:
    """The parts of `name`.

    Raises:
        ValueError: it does not have the form of a canonical name.
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
    """Whether `name` is a weight that may be quantized: the weight of a projection in a layer, or the lm_head.

    A router and the gate of a shared expert may not: they are small, and errors in them would choose other experts.
    `attention.kv_up` may not either: absorbed attention multiplies it from both sides, so row scales do not fit it.
    Neither may the small projections of linear attention, of an indexer, of compressors and of a layer's input for each
    token.
    """
    layer, part, kind = parse_name(name)
    if layer is None or kind != "weight":
        return part == "lm_head" and kind == "weight"
    return not part.endswith(_NEVER_QUANTIZED)


def is_kept_in_float32(name: str) -> bool:
    """Whether `name` stays in float32 for every dtype.

    These are attention sinks and learned factors, since their kernels read float32, and a router's bias, since it
    decides between close scores. Mixtures of residual streams stay too.
    """
    _, part, kind = parse_name(name)
    return (kind == "bias" and part in _IN_FLOAT32) or part.endswith(_STREAMS)


def expert_of(part: str) -> int | None:
    """The expert of a part like "feed_forward.experts.7.gate"; None: the part does not belong to an expert."""
    prefix = "feed_forward.experts."
    return int(part.removeprefix(prefix).partition(".")[0]) if part.startswith(prefix) else None


def kind_of(name: str) -> str:
    """`name` without the numbers of its layer and expert: "attention.q", "feed_forward.experts.gate"."""
    return ".".join(word for word in parse_name(name).part.split(".") if not word.isdecimal())


class CountedParameter(NamedTuple):
    """Parameters of one shape that stand in the same place of equal layers, or of equal experts."""

    name: str
    """The name of the first of them."""
    shape: Shape
    num_layers: int
    """Number of layers that have it; 1 outside of layers."""
    num_experts: int
    """Number of experts in each of these layers that have it; 0: it does not belong to an expert."""


def counted_parameters(
    spec: DecoderSpec, layers: Span, layer_class: Callable[[int], Hashable] = lambda index: None
) -> Iterator[CountedParameter]:
    """The parameters of `stage_parameters`, with equal layers and equal experts counted once.

    Layers are equal if they have equal parts and the same `layer_class`.
    """
    yield from (CountedParameter(name, shape, 1, 0) for name, shape in _before_layers(spec, layers))
    equal: dict[tuple[int, Hashable], list[int]] = {}
    same: dict[Layer, int] = {}
    seen: dict[int, int] = {}
    for index in range(layers.start, layers.stop):
        layer = spec.layers[index]
        # Most equal layers are one object. So few layers are hashed, which takes longer than everything else here.
        if id(layer) not in seen:
            seen[id(layer)] = same.setdefault(layer, index)
        equal.setdefault((seen[id(layer)], layer_class(index)), []).append(index)
    for indices in equal.values():
        layer = spec.layers[indices[0]]
        for part, shape in layer_parameters(layer, spec.hidden_size, num_experts=1):
            experts = 0
            if isinstance(layer.feed_forward, MoE) and expert_of(part) is not None:
                experts = layer.feed_forward.routing.num_experts
            yield CountedParameter(f"layers.{indices[0]}.{part}", shape, len(indices), experts)
    yield from (CountedParameter(name, shape, 1, 0) for name, shape in _after_layers(spec, layers))


def parameters(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    """(name, full shape) of every parameter in the order of computation.

    With tied embeddings there is no `lm_head.weight`.
    """
    yield from stage_parameters(spec, Span(0, len(spec.layers)))


def stage_parameters(spec: DecoderSpec, layers: Span) -> Iterator[tuple[str, Shape]]:
    """(name, full shape) of every parameter that a pipeline stage with `layers` needs.

    The first stage has the embeddings, and the last stage has the final norm and the lm_head. With tied embeddings, the
    last stage has its own `embed.weight`, unless it is the first stage too. If layers have inputs of their own for each
    token, every stage has `embed.weight`.
    """
    yield from _before_layers(spec, layers)
    for index in range(layers.start, layers.stop):
        for part, shape in layer_parameters(spec.layers[index], spec.hidden_size):
            yield f"layers.{index}.{part}", shape
    yield from _after_layers(spec, layers)


def embeds_tokens(spec: DecoderSpec, layers: Span) -> bool:
    """Whether a pipeline stage with `layers` looks up token embeddings."""
    return layers.start == 0 or spec.token_input is not None


def is_looked_up(name: str) -> bool:
    """Whether a step reads some rows of parameter `name`, and does not multiply with it."""
    return parse_name(name).part in ("embed", "positions", "token_input.embed")


def _before_layers(spec: DecoderSpec, layers: Span) -> Iterator[tuple[str, Shape]]:
    if embeds_tokens(spec, layers):
        yield "embed.weight", (spec.vocab_size, spec.hidden_size)
    if layers.start == 0 and spec.learned_positions is not None:
        yield "positions.weight", (spec.learned_positions, spec.hidden_size)
    if spec.token_input is not None:
        yield from _norm("token_input_norm", spec.token_input.norm, spec.token_input.size)


def _after_layers(spec: DecoderSpec, layers: Span) -> Iterator[tuple[str, Shape]]:
    if layers.stop < len(spec.layers):
        return
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield from head_stream_parameters(spec)
    yield from _norm("final_norm", spec.final_norm, hidden)
    if not spec.tied_embeddings:
        yield "lm_head.weight", (vocab, hidden)
    elif not embeds_tokens(spec, layers):
        yield "embed.weight", (vocab, hidden)
    if spec.lm_head_bias:
        yield "lm_head.bias", (vocab,)


def layer_parameters(layer: Layer, hidden_size: int, num_experts: int | None = None) -> Iterator[tuple[str, Shape]]:
    """(name without `layers.{i}.`, full shape) of one layer's parameters, with its first `num_experts` experts only."""
    yield from _norm("attention_norm", layer.attention_norm, hidden_size)
    yield from _attention(layer.attention, hidden_size)
    yield from _norm("post_attention_norm", layer.post_attention_norm, hidden_size)
    yield from _norm("feed_forward_norm", layer.feed_forward_norm, hidden_size)
    if isinstance(layer.feed_forward, MoE):
        yield from _experts(layer.feed_forward, hidden_size, num_experts)
    else:
        yield from _dense("feed_forward", layer.feed_forward, hidden_size)
    yield from _norm("post_feed_forward_norm", layer.post_feed_forward_norm, hidden_size)
    yield from stream_parameters(layer, hidden_size)
    if layer.token_input is not None:
        yield from _token_input(layer.token_input, hidden_size)
    if layer.output_scale:
        yield "output_scale.bias", (1,)


def _token_input(token_input: TokenInput, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    size = token_input.size
    yield "token_input.embed.weight", (token_input.vocab_size, size)
    yield "token_input.projection.weight", (size, hidden_size)
    yield "token_input.gate.weight", (size, hidden_size)
    yield "token_input.down.weight", (hidden_size, size)
    yield from _norm("token_input.norm", token_input.norm, hidden_size)


def _attention(attention: Attention, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    if isinstance(attention, MLA):
        yield from _mla(attention, hidden_size)
    elif isinstance(attention, CompressedMQA):
        yield from compressed_parameters(attention, hidden_size)
    elif isinstance(attention, LinearAttention):
        yield from _linear_attention(attention, hidden_size)
    else:
        yield from _gqa(attention, hidden_size)


def _linear_attention(attention: LinearAttention, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    heads = attention.num_value_heads
    yield from _linear("attention.qkv", attention.conv_size, hidden_size, False)
    yield from _linear("attention.z", attention.value_size, hidden_size, False)
    yield from _linear("attention.beta", heads, hidden_size, False)
    yield from _linear("attention.decay", heads, hidden_size, False)
    yield "attention.conv.weight", (attention.conv_size, attention.conv_width)
    yield "attention.decay_log.bias", (heads,)
    yield "attention.decay_offset.bias", (heads,)
    yield "attention.norm.weight", (attention.value_head_dim,)
    yield from _linear("attention.o", hidden_size, attention.value_size, False)


def _indexer(indexer: Indexer, query_size: int, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    rows = indexer.num_heads * indexer.head_dim
    yield from _linear("attention.indexer_q", rows, query_size, False)
    yield from _linear("attention.indexer_k", indexer.head_dim, hidden_size, False)
    yield from _linear("attention.indexer_weights", indexer.num_heads, hidden_size, False)
    yield "attention.indexer_norm.weight", (indexer.head_dim,)
    yield "attention.indexer_norm.bias", (indexer.head_dim,)


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
    if isinstance(mla, SparseMLA):
        yield from _indexer(mla.indexer, mla.q_lora_rank or hidden_size, hidden_size)


def _gqa(attention: GQA, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    parts = [("q", q_size), ("k", kv_size), ("v", attention.num_kv_heads * attention.value_head_dim)]
    if isinstance(attention, PlannedGQA):
        parts[0] = ("q", q_size * (1 + attention.output_gate))
    parts = parts[:2] if attention.value_is_key else parts
    reads_only = attention.kv_source is not None
    parts = parts[:1] if reads_only else parts
    for part, size in parts:
        yield from _linear(f"attention.{part}", size, hidden_size, attention.qkv_bias)
    whole = attention.norms_all_heads
    yield from _norm("attention.q_norm", attention.qk_norm, q_size if whole else attention.head_dim)
    if not reads_only:
        yield from _norm("attention.k_norm", attention.qk_norm, kv_size if whole else attention.head_dim)
    if attention.sinks:
        yield "attention.sinks.bias", (attention.num_heads,)
    yield from _linear(
        "attention.o", hidden_size, attention.num_heads * attention.value_head_dim, attention.output_bias
    )
    if isinstance(attention, PlannedGQA) and attention.indexer is not None:
        yield from _indexer(attention.indexer, hidden_size, hidden_size)


def _experts(moe: MoE, hidden_size: int, num_experts: int | None) -> Iterator[tuple[str, Shape]]:
    routing = moe.routing
    yield from _linear("feed_forward.router", routing.num_experts, hidden_size, routing.correction_bias)
    if routing.logits_bias:
        yield "feed_forward.router_logits.bias", (routing.num_experts,)
    if moe.latent_size is not None:
        yield from _linear("feed_forward.latent_down", moe.latent_size, hidden_size, False)
        yield from _linear("feed_forward.latent_up", hidden_size, moe.latent_size, False)
    for expert in range(routing.num_experts if num_experts is None else num_experts):
        yield from _dense(f"feed_forward.experts.{expert}", moe.expert, moe.latent_size or hidden_size)
    if routing.expert_scale:
        yield "feed_forward.expert_scale.bias", (routing.num_experts,)
    for name in ("router", "experts", "experts_output", "shared_output") if moe.own_norms else ():
        yield from _norm(f"feed_forward.{name}_norm", moe.own_norms, hidden_size)
    if moe.shared is not None:
        yield from _dense("feed_forward.shared", moe.shared, hidden_size)
    if moe.shared_gate:
        yield from _linear("feed_forward.shared_gate", 1, hidden_size, False)


def _dense(name: str, dense: Dense, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    for part in ("gate", "up") if dense.gated else ("up",):
        yield from _linear(f"{name}.{part}", dense.intermediate_size, hidden_size, dense.bias)
    yield from _linear(f"{name}.down", hidden_size, dense.intermediate_size, dense.bias)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def _norm(name: str, norm: Norm | None, size: int) -> Iterator[tuple[str, Shape]]:
    if norm is not None:
        yield f"{name}.weight", (size,)
        if norm.bias:
            yield f"{name}.bias", (size,)
