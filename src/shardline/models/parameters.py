"""Every parameter of a DecoderSpec by its canonical name. Loader, dummy weights and sizes share this list.

Names: `embed.weight` [vocab, hidden], `positions.weight` [positions, hidden], `final_norm.*`, `lm_head.*`, and
per layer `layers.{i}.` + `attention.{q,k,v,o}.*`, `attention.{q_norm,k_norm}.weight`, `feed_forward.{gate,up,down}.*`,
`{attention_norm,post_attention_norm,feed_forward_norm,post_feed_forward_norm}.*`. A linear weight is [out, in].
A model that classifies has `classifier.weight` [labels, hidden] instead of the lm_head.
The scores of attention sinks are `attention.sinks.bias` [heads], and the factor of a layer's output is
`output_scale.bias` [1]. A layer that reads the cache of another layer has no k and v.

If layers have inputs of their own for each token, a layer has `token_input.embed.weight` [vocab, size],
`token_input.{projection,gate}.weight` [size, hidden], `token_input.down.weight` [hidden, size] and
`token_input.norm.weight` [hidden]. The norm of the projections, `token_input_norm.weight` [size], is the model's.

Latent attention has `attention.q` or `attention.{q_down,q_norm,q_up}`, and `attention.{kv_down,kv_norm,kv_up}` and
`attention.o`. The rows of `kv_down` give the latent, then the rotated part of the key. `kv_up` has, for each head in
order, the rows of the key's other part and then the rows of the value.

A head has `head_input.projection.weight` [hidden, 2 * hidden, or as many as the layers have that it reads] and perhaps
its bias and the norms `head_input.{token_norm,hidden_norm,sources_norm}`, but no embedding. If it has an lm_head, its
rows may stand for the tokens `row + head_input.token_offsets.bias[row]`.

A mixture of experts has `feed_forward.router.weight` [experts, hidden] and `.bias` [experts] (for choosing only) or
`feed_forward.router_logits.bias` [experts], `feed_forward.expert_scale.bias` [experts], norms of its own
`feed_forward.{router,experts,experts_output,shared_output}_norm.weight`,
`feed_forward.experts.{e}.{gate,up,down}.*`, `feed_forward.shared.{gate,up,down}.*` and
`feed_forward.shared_gate.weight` [1, hidden]. If experts compute in a smaller space, `feed_forward.latent_{down,up}`
lead into it and out of it.

Linear attention has `attention.{q,k,v,z,beta,decay,o}.weight`, `attention.{q,k,v}_conv.weight` [channels, width], and
per value head `attention.{decay_log,decay_offset}.bias`; the norm of its outputs is `attention.norm.weight` [value
head]. Mamba-2 has `attention.step.weight` in place of beta and decay, `attention.skip.bias` per head and perhaps
`attention.{q,k,v}_conv.bias`; its norm is [heads * head]. If outputs of heads have gates, `attention.q` has the rows of
a head's gate behind those of its query.

The indexer of sparse attention has `attention.indexer_{q,k,weights}.weight` and `attention.indexer_norm.*`. For the
parameters of compressed attention and of several residual streams see `planner/models/parts/compressed.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from shardline.models.partition import Span
from shardline.models.parts import Parameters, Shape, norm_parameters
from shardline.models.spec import DecoderSpec, Layer
from shardline.weights.base import Role

_WHOLE_NUMBERS = "head_input.token_offsets"
_IN_FLOAT32 = (
    *(
        "attention.sinks",
        "feed_forward.router",
        "feed_forward.expert_scale",
        "output_scale",
        "attention.decay_log",
        "attention.decay_offset",
        "attention.skip",
    ),
    _WHOLE_NUMBERS,
)
_STREAMS = "_streams"
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("attention.q", "attention.q_down", "attention.q_up", "attention.o"), "attention"),
    **dict.fromkeys(("attention.k", "attention.v", "attention.kv_down"), "key_value"),
    **dict.fromkeys(("feed_forward.down", "feed_forward.shared.down"), "down"),
}
_NEVER_QUANTIZED = (
    *("compressor_kv", "compressor_gate", _STREAMS),
    *("norm", "router", "shared_gate", "kv_up", "beta", "decay", "conv", "indexer_q", "indexer_k", "indexer_weights"),
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

    These are attention sinks, learned factors, and the decays and convolutions of linear attention, since their kernels
    read float32, and a router's bias, since it decides between close scores. Mixtures of residual streams and whole
    numbers stay too.
    """
    _, part, kind = parse_name(name)
    return (kind == "bias" and part in _IN_FLOAT32) or part.endswith((_STREAMS, "_conv"))


def holds_whole_numbers(name: str) -> bool:
    """Whether a checkpoint has `name` as integers."""
    return parse_name(name).part == _WHOLE_NUMBERS


def expert_of(part: str) -> int | None:
    """The expert of a part like "feed_forward.experts.7.gate"; None: the part does not belong to an expert."""
    prefix = "feed_forward.experts."
    return int(part.removeprefix(prefix).partition(".")[0]) if part.startswith(prefix) else None


def role_of(name: str) -> Role:
    """The role of a linear weight."""
    part = parse_name(name).part
    if part == "lm_head":
        return "lm_head"
    if expert_of(part) is not None:
        return "expert"
    return _ROLES.get(part, "layer")


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
        for part, shape in layer.parameters(spec.hidden_size, num_experts=1):
            routing = layer.feed_forward.routing
            experts = 0 if routing is None or expert_of(part) is None else routing.num_experts
            yield CountedParameter(f"layers.{indices[0]}.{part}", shape, len(indices), experts)
    yield from (CountedParameter(name, shape, 1, 0) for name, shape in _after_layers(spec, layers))


def parameters(spec: DecoderSpec) -> Parameters:
    """(name, full shape) of every parameter in the order of computation.

    With tied embeddings there is no `lm_head.weight`.
    """
    yield from stage_parameters(spec, Span(0, len(spec.layers)))


def stage_parameters(spec: DecoderSpec, layers: Span) -> Parameters:
    """(name, full shape) of every parameter that a pipeline stage with `layers` needs.

    The first stage has the embeddings, and the last stage has the final norm and the lm_head. With tied embeddings, the
    last stage has its own `embed.weight`, unless it is the first stage too. If layers have inputs of their own for each
    token, every stage has `embed.weight`.
    """
    yield from _before_layers(spec, layers)
    for index in range(layers.start, layers.stop):
        for part, shape in spec.layers[index].parameters(spec.hidden_size):
            yield f"layers.{index}.{part}", shape
    yield from _after_layers(spec, layers)


def embeds_tokens(spec: DecoderSpec, layers: Span) -> bool:
    """Whether a pipeline stage with `layers` looks up token embeddings."""
    return spec.head_input is None and (layers.start == 0 or spec.token_input is not None)


def is_looked_up(name: str) -> bool:
    """Whether a step reads some rows of parameter `name`, and does not multiply with it."""
    return parse_name(name).part in ("embed", "positions", "token_input.embed")


def _before_layers(spec: DecoderSpec, layers: Span) -> Parameters:
    if spec.head_input is not None:
        yield from spec.head_input.parameters(spec.hidden_size)
        return
    if embeds_tokens(spec, layers):
        yield "embed.weight", (spec.vocab_size, spec.hidden_size)
    if layers.start == 0 and spec.learned_positions is not None:
        yield "positions.weight", (spec.learned_positions, spec.hidden_size)
    if spec.token_input is not None:
        yield from norm_parameters("token_input_norm", spec.token_input.norm, spec.token_input.size)


def _after_layers(spec: DecoderSpec, layers: Span) -> Parameters:
    if layers.stop < len(spec.layers):
        return
    hidden, vocab, head = spec.hidden_size, spec.vocab_size, spec.head_input
    yield from spec.layers[0].head_parameters(hidden)
    if head is None or head.output_norm:
        yield from norm_parameters("final_norm", spec.final_norm, hidden)
    if head is not None:
        yield from head.parameters_of_lm_head(vocab, hidden)
        return
    if spec.num_labels is not None:
        yield "classifier.weight", (spec.num_labels, hidden)
        return
    if not spec.tied_embeddings:
        yield "lm_head.weight", (vocab, hidden)
    elif not embeds_tokens(spec, layers):
        yield "embed.weight", (vocab, hidden)
    if spec.lm_head_bias:
        yield "lm_head.bias", (vocab,)
