"""KV groups: which layers share a block table, and how many blocks requests need in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from shardline.models.attention import Attention
from shardline.models.spec import DecoderSpec

SPLIT_TOKENS = 512
"""Attention computes so many keys apart, counted from position 0, and then merges these splits. If ranks share the
keys of a request, each has every so-manieth split."""


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
    """The layers at which no pipeline stage may begin: they, or later ones, read the cache of an earlier layer."""
    sources = [(storing_layer(spec, index), index) for index in range(len(spec.layers))]
    return frozenset(start for source, index in sources for start in range(source + 1, index + 1))


def blocks_per_request(
    groups: Sequence[KVGroup], num_tokens: int, block_size: int, max_step_tokens: int, context: int = 1
) -> int:
    """The most blocks that one request of `num_tokens` holds at once, summed over all KV groups.

    A windowed group gives back the blocks that slid out of the window. It still holds the window and the new tokens of
    a whole step. If `context` ranks share the keys of a request, each counts as many blocks as the one with the most.
    """
    total = 0
    for group in groups:
        held = num_tokens if group.window is None else min(num_tokens, group.window + max_step_tokens + block_size)
        total += context * _most_of_a_rank(-(-held // block_size), SPLIT_TOKENS // block_size, context)
    return total


def _most_of_a_rank(num_blocks: int, of_split: int, ranks: int) -> int:
    """The most of `num_blocks` consecutive blocks that one of `ranks` has; a split has `of_split`."""
    if ranks == 1:
        return num_blocks
    rounds, rest = divmod(num_blocks, of_split * ranks)
    return rounds * of_split + min(rest, of_split)


def longest_request(
    groups: Sequence[KVGroup], num_blocks: int, block_size: int, max_step_tokens: int, most: int, context: int = 1
) -> int:
    """Tokens of the longest request that fits in `num_blocks` blocks, at most `most`; 0 if no request fits. `context`
    as in `blocks_per_request`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_request(groups, middle, block_size, max_step_tokens, context) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
