"""How many KV blocks a request needs, and how long a request a pool can hold."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.models.partition import KVGroup


def blocks_per_request(groups: Sequence[KVGroup], num_tokens: int, block_size: int, max_step_tokens: int) -> int:
    """The most blocks that one request of `num_tokens` holds at once, summed over all KV groups.

    A windowed group gives back the blocks that slid out of the window. It still holds the window and the new tokens of
    a whole step.
    """
    total = 0
    for group in groups:
        held = num_tokens if group.window is None else min(num_tokens, group.window + max_step_tokens + block_size)
        total += -(-held // block_size)
    return total


def longest_request(
    groups: Sequence[KVGroup], num_blocks: int, block_size: int, max_step_tokens: int, most: int
) -> int:
    """Tokens of the longest request that fits in `num_blocks` blocks, at most `most`; 0 if no request fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_request(groups, middle, block_size, max_step_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
