"""How many blocks of the KV cache requests need."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.models.kv_groups import KVGroup

SPLIT_TOKENS = 512
"""Attention computes so many keys apart, counted from position 0, and then merges these splits. If ranks share the
keys of a request, each has every so-manieth split."""


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
