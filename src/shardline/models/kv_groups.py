"""KV groups: which layers share a block table."""

from __future__ import annotations

import functools

import msgspec

from shardline.models.attention import Attention
from shardline.models.spec import DecoderSpec


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table. They have the same shape and the same window."""

    layers: tuple[int, ...]
    window: int | None


@functools.lru_cache(maxsize=256)
def kv_groups(spec: DecoderSpec) -> tuple[KVGroup, ...]:
    """The model's layers in groups. A group has at most as many layers as the model's rarest kind of attention.

    All groups use blocks of one pool, and a block is `max(len(group.layers))` layers deep. So groups of similar depth
    waste little memory (the idea of vLLM's hybrid KV cache manager). A group takes every n-th layer of its kind, so
    each pipeline stage has an equal share of it. Groups of full attention come first. Layers that read another layer's
    cache are in no group.
    """
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if stores_tokens(layer.attention):
            by_window.setdefault(layer.attention.window, []).append(index)
    if not by_window:
        raise ValueError(f"no layer of this {spec.model_type} has keys and values, which the engine needs")
    depth = min(len(layers) for layers in by_window.values())
    groups: list[KVGroup] = []
    for window in sorted(by_window, key=lambda w: (w is not None, w or 0)):
        layers = by_window[window]
        num_groups = -(-len(layers) // depth)
        groups.extend(KVGroup(tuple(layers[first::num_groups]), window) for first in range(num_groups))
    return tuple(groups)


def stores_tokens(attention: Attention) -> bool:
    """Whether a layer with this attention stores something for each token: keys and values, or a latent."""
    return attention.key_dim > 0 and attention.kv_source is None


def storing_layer(spec: DecoderSpec, index: int) -> int:
    """The layer whose keys and values layer `index` reads: itself, or the one that shares them."""
    source = spec.layers[index].attention.kv_source
    return index if source is None else source


@functools.lru_cache(maxsize=256)
def last_storing_layer(spec: DecoderSpec) -> int:
    """The last layer that needs all tokens of a step. Later layers store nothing, so they need only sampled tokens."""
    layers = range(len(spec.layers))
    return max(index for index in layers if storing_layer(spec, index) == index)


@functools.lru_cache(maxsize=256)
def joined_layers(spec: DecoderSpec) -> frozenset[int]:
    """The layers at which no pipeline stage may begin: they, or later ones, read the cache of an earlier layer, or its
    choice of tokens."""
    sources = [(storing_layer(spec, index), index) for index in range(len(spec.layers))]
    sources += [(index - 1, index) for index, layer in enumerate(spec.layers) if layer.attention.reads_choice]
    return frozenset(start for source, index in sources for start in range(source + 1, index + 1))
