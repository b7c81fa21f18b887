"""Which part of each parameter a tensor-parallel rank holds. `shard` is the only function that decides this."""

from __future__ import annotations

import functools
from typing import Literal

from shardline.models.parameters import expert_of, parse_name
from shardline.models.partition import ExpertShare, Span, split_dim
from shardline.models.spec import DecoderSpec

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
    """The part of parameter `name` that rank `tp_rank` of `tp_size` holds: per dim a span, or None for the whole dim.

    Every linear is split by its output: q, k and v by heads, o and down by the hidden size, gate and up by the
    intermediate size, embedding and lm_head by the vocabulary. With numerics "fast", o and down are split by their
    input instead. Their biases are then whole, since they are added once, after the sum. Norms, learned positions,
    routers, gates of shared experts and classifiers are whole. Experts are split like any other feed-forward block.
    With `experts`, each expert is whole on one rank and has no rows on the others. Each part says how its own
    parameters are split. A span may be empty.

    Raises:
        ValueError: the name is not a parameter of a decoder, or this number of ranks cannot share the heads.
    """
    layer, part, kind = parse_name(name)
    whole: Spans = (None, None) if kind == "weight" else (None,)
    if layer is None:
        if part in ("embed", "lm_head"):
            return _split(0, split_dim(spec.vocab_size, tp_size)[tp_rank], whole)
        if part == "head_input.projection":
            return _split(0, split_dim(spec.hidden_size, tp_size)[tp_rank], whole)
        if part in ("positions", "head_streams", "classifier"):
            return whole
        if part in ("final_norm", "token_input_norm") or part.startswith("head_input."):
            return (None,)
        raise ValueError(f"{name!r} is no canonical parameter name")
    if part.endswith("norm") or part == "output_scale":
        return (None,)
    if part.endswith("_streams"):
        return whole
    own, expert = spec.layers[layer], expert_of(part)
    try:
        span = own.split(part, tp_rank, tp_size)
    except KeyError:
        raise ValueError(f"{name!r} is no canonical parameter name") from None
    if experts is not None and expert is not None:
        routing = own.feed_forward.routing
        assert routing is not None
        mine = split_dim(routing.num_experts, experts.size)[experts.rank]
        return whole if mine.start <= expert < mine.stop else _split(0, Span(0, 0), whole)
    if span is None:
        return (None, None) if part.endswith("_position") else whole
    if part.rpartition(".")[2] not in ("o", "down"):
        return _split(int(part == "token_input.embed"), span, whole)
    if numerics == "exact":
        width = spec.hidden_size if expert is None else own.feed_forward.expert_width(spec.hidden_size)
        return _split(0, split_dim(width, tp_size)[tp_rank], whole)
    return whole if kind == "bias" else _split(1, span, whole)


def shard_shape(shape: tuple[int, ...], spans: Spans) -> tuple[int, ...]:
    """Shape of the part `spans` of a tensor with `shape`."""
    return tuple(size if span is None else span.size for size, span in zip(shape, spans, strict=True))


def _split(dim: int, span: Span, whole: Spans) -> Spans:
    return (*whole[:dim], span, *whole[dim + 1 :])


@functools.lru_cache(maxsize=256)
def check_tensor_parallel(spec: DecoderSpec, tensor: int, context: int = 1) -> None:
    """Refuse a number of ranks, `tensor` x `context`, that cannot share some layer.

    Raises:
        ValueError: the size does not work. The message names the nearest sizes that work.
    """
    size = tensor * context
    if _splits(spec, size):
        return
    asked = f"tensor_parallel_size {tensor}"
    if context > 1:
        asked += f" x context_parallel_size {context} = {size}"
    legal = [n for n in range(1, max(layer.attention.num_heads for layer in spec.layers) + 1) if _splits(spec, n)]
    below = max(n for n in legal if n < size)
    above = min((n for n in legal if n > size), default=None)
    nearest = f"{below}" if above is None else f"{below} or {above}"
    heads = min((layer.attention for layer in spec.layers), key=lambda attention: attention.num_heads)
    has_keys = heads.key_dim and not heads.latent_sizes
    kv_heads = f"{heads.num_kv_heads} KV heads" if has_keys else "one latent for all of them"
    if heads.keeps_state:
        kv_heads = "a state for each of them"
    raise ValueError(
        f"{asked} does not work for this model: it has {heads.num_heads} attention heads and "
        f"{kv_heads}, and every rank needs at least one attention head; use {nearest}"
    )


def _splits(spec: DecoderSpec, size: int) -> bool:
    try:
        for attention in {layer.attention for layer in spec.layers}:
            attention.split_heads(size)
    except ValueError:
        return False
    smallest = min(layer.feed_forward.narrowest for layer in spec.layers)
    inputs = spec.hidden_size if spec.token_input is None else spec.token_input.size
    return size <= min(smallest, inputs, spec.hidden_size, spec.vocab_size)


def check_expert_parallel(spec: DecoderSpec, tensor: int, data: int) -> None:
    """Refuse expert parallelism over `tensor` x `data` ranks a stage if some layer has fewer experts.

    Raises:
        ValueError: the model has no experts, or too few. The message says what works.
    """
    counts = [routing.num_experts for layer in spec.layers if (routing := layer.feed_forward.routing) is not None]
    if not counts:
        raise ValueError(
            f"enable_expert_parallel needs a mixture-of-experts model, but {spec.model_type} has no experts; leave "
            "it out"
        )
    if tensor * data > min(counts):
        ranks = f"{tensor} ranks (tensor_parallel_size)"
        if data > 1:
            ranks = f"{tensor * data} ranks (tensor_parallel_size {tensor} x data_parallel_size {data})"
        raise ValueError(
            f"enable_expert_parallel gives every rank whole experts, and {ranks} cannot share {min(counts)}; "
            f"use {min(counts)} ranks a stage or fewer, or leave enable_expert_parallel out"
        )
