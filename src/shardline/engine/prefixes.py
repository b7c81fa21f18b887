"""What the blocks of a prefix are known by, and how many of them a sequence can skip, given those that are cached."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from shardline.models.kv_groups import KVGroup

_DIGEST_BYTES = 16


def cache_namespace(weights: str, secret: bytes) -> bytes:
    """What the keys of cached prefixes begin with: equal for engines with the same weights and secret.

    `weights`: a name of everything that keys and values depend on, such as a fingerprint. `secret`: of a deployment.
    """
    return blake2b(weights.encode(), key=secret, digest_size=32).digest()


class BlockHasher:
    """Chained hashes of full token blocks: equal hashes mean equal namespace, salt, position and tokens so far.

    The chains start from the namespace, which depends on a secret, so that nobody can compute a collision or the chain
    of a salt in advance.
    """

    def __init__(self, block_size: int, namespace: bytes) -> None:
        self._block_size = block_size
        self._namespace = namespace

    def successor(self) -> BlockHasher:
        """A hasher whose hashes are unlike all of this one's."""
        return BlockHasher(self._block_size, blake2b(b"reset", key=self._namespace).digest())

    def extend(self, hashes: list[bytes], salt: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Extend `hashes`, those of the first blocks of `token_ids`, to `num_blocks` blocks."""
        if len(hashes) >= num_blocks:
            return
        if hashes:
            parent = hashes[-1]
        else:
            root = salt.encode("utf-8", "surrogatepass")
            parent = blake2b(root, digest_size=_DIGEST_BYTES, key=self._namespace).digest()
        size = self._block_size
        for start in range(len(hashes) * size, num_blocks * size, size):
            tokens = array("q", token_ids[start : start + size]).tobytes()
            parent = blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()
            hashes.append(parent)


def num_window_blocks(window: int, block_size: int) -> int:
    """Full blocks before a block boundary that the token at the boundary attends to with this window."""
    return -(-(window - 1) // block_size)


def longest_hit(groups: Sequence[KVGroup], block_size: int, num_blocks: int, cached: Callable[[int, int], bool]) -> int:
    """The largest number of blocks, at most `num_blocks`, that a sequence can skip.

    `cached(group, block)` tells whether a block of the sequence is cached. Full attention needs every skipped block. A
    windowed group needs only the blocks to which the first token after them attends.
    """
    length = num_blocks
    for index, group in enumerate(groups):
        if group.window is None:
            length = next((block for block in range(length) if not cached(index, block)), length)
    # A shorter length moves the windows of all groups, so repeat until the length does not change.
    while True:
        before = length
        for index, group in enumerate(groups):
            if group.window is not None:
                length = _window_hit(index, num_window_blocks(group.window, block_size), length, cached)
        if length == before:
            return length


def _window_hit(group: int, needed: int, length: int, cached: Callable[[int, int], bool]) -> int:
    """The largest length whose last `needed` blocks (all of them, if there are fewer) are cached in `group`."""
    if needed == 0:
        return length
    for block in range(length - 1, -1, -1):
        if not cached(group, block):
            length = block
        elif length - block >= needed:
            return length
    return length
